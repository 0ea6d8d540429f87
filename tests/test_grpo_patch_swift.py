"""patch-swift on copies of an installed ms-swift: a small environment whose site-packages hold the real file."""

from __future__ import annotations

import hashlib
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.errors import UserError
from configs.load import ROOT
from training import patch_swift

INSTALLED = next((ROOT / ".venv-train/lib").glob("python3.*/site-packages/swift")) / patch_swift.TARGET


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A bare environment with ms-swift's metadata and the one file, as released."""
    venv.create(tmp_path, with_pip=False)
    packages = next(tmp_path.glob("lib/python3.*/site-packages"))
    file = packages / "swift" / patch_swift.TARGET
    file.parent.mkdir(parents=True)
    (packages / "swift" / "__init__.py").touch()
    metadata = packages / "ms_swift-4.6.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-swift\nVersion: 4.6.0\n")
    file.write_text(patch_swift.remove(INSTALLED.read_text()))
    return tmp_path


def python(environment: Path) -> Path:
    return environment / "bin" / "python"


def target(environment: Path) -> Path:
    return next(environment.glob("lib/python3.*/site-packages/swift")) / patch_swift.TARGET


def test_patching_twice_is_patching_once_and_reverting_gives_the_released_file(environment: Path) -> None:
    file = target(environment)
    released = file.read_bytes()
    assert hashlib.sha256(released).hexdigest() == patch_swift.KNOWN["4.6.0"]
    assert "is patched" in patch_swift.run(python(environment))
    patched = file.read_bytes()
    assert patched != released
    assert "already patched" in patch_swift.run(python(environment))
    assert file.read_bytes() == patched
    assert "as it was installed" in patch_swift.run(python(environment), revert=True)
    assert file.read_bytes() == released
    assert "not patched" in patch_swift.run(python(environment), revert=True)


def test_a_dry_run_changes_nothing(environment: Path) -> None:
    before = target(environment).read_bytes()
    assert "would patch" in patch_swift.run(python(environment), dry_run=True)
    assert target(environment).read_bytes() == before


def test_an_altered_file_is_refused_and_left_alone(environment: Path) -> None:
    file = target(environment)
    file.write_text(file.read_text() + "# mine\n")
    altered = file.read_bytes()
    for revert in (False, True):
        with pytest.raises(UserError, match="reinstall ms-swift"):
            patch_swift.run(python(environment), revert=revert)
    assert file.read_bytes() == altered


def test_an_unknown_version_is_refused(environment: Path) -> None:
    metadata = next(environment.glob("lib/python3.*/site-packages/*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text().replace("4.6.0", "4.9.9"))
    with pytest.raises(UserError, match=r"4\.9\.9.*known for 4\.6\.0 and 4\.5\.2 only"):
        patch_swift.run(python(environment))


def test_an_environment_without_ms_swift_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="setup_env"):
        patch_swift.run(tmp_path / "bin" / "python")
    with pytest.raises(UserError, match="not installed there"):
        patch_swift.run(Path(sys.executable))


class Move:
    """A trainer's side of ms-swift's `_move_model_to_vllm`, run from the text of the file."""

    def __init__(self, text: str, **args: Any) -> None:
        method = text[text.index("    def _move_model_to_vllm") : text.index("    def _reset_vllm_cache")]
        rule = text[text.rindex("\n\n\n") :] if patch_swift.BEGIN in text else ""
        rule = "from __future__ import annotations\nfrom typing import Any\n" + rule.replace(patch_swift.END, "")
        names: dict[str, Any] = {"logger": SimpleNamespace(info=lambda _: None)}
        exec(compile(rule, "rule", "exec"), names)
        exec(compile("class T:\n" + method.rsplit("@profiling_decorator", 1)[0], "method", "exec"), names)
        self.calls: list[str] = []
        trainer = names["T"]()
        base = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "tuner_type": "lora",
            "sleep_level": 0,
            "async_generate": False,
        }
        trainer.args = SimpleNamespace(**base | args)
        trainer.base_sync_done, trainer.rollout_enable_lora, trainer._patch_load_format = False, True, "auto"
        adapter = SimpleNamespace(modules_to_save=None, use_dora=False, bias="none")
        trainer.model = SimpleNamespace(peft_config={"default": adapter}, named_parameters=list)
        trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        trainer._move_full_model_to_vllm = lambda: self.calls.append("whole model")
        trainer._move_adapter_to_vllm = lambda: self.calls.append("adapter")
        trainer._reset_vllm_cache = lambda: None
        trainer._move_model_to_vllm()


def test_the_patched_file_sends_only_the_adapter_first_and_the_released_one_the_whole_model() -> None:
    released = patch_swift.remove(INSTALLED.read_text())
    assert Move(released).calls == ["whole model"]
    assert Move(patch_swift.insert(released)).calls == ["adapter"]


def test_the_patched_file_keeps_the_whole_first_sync_where_skipping_is_unsafe() -> None:
    patched = patch_swift.insert(patch_swift.remove(INSTALLED.read_text()))
    assert Move(patched, sleep_level=2).calls == ["whole model"]
    assert Move(patched, vllm_mode="server").calls == ["whole model"]
