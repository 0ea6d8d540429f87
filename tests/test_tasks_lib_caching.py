"""When Prefect may believe a stored record, and which failures deserve another try."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.errors import UserError, WorkFailed
from configs.files import write_atomic
from configs.load import load_profile
from configs.manifest import MANIFEST, StepResult, run_step
from configs.profile import Profile
from sandboxes.base import SandboxError, SandboxGone, SandboxUnavailable
from tasks_lib.caching import step_key, whole
from tasks_lib.policy import Interrupted, transient


def _made(folder: Path, text: str = "weights") -> StepResult:
    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        write_atomic(folder / "checkpoint-4" / "adapter.bin", text)
        write_atomic(folder / "metrics.jsonl", "{}\n")
        return folder, {"adapter": folder / "checkpoint-4", "metrics": folder / "metrics.jsonl"}, {"loss": 0.5}

    return run_step("sft", version=1, inputs={"rows": text}, candidates=lambda: [folder], make=make)


def _profile(folder: Path, **flags: Any) -> Profile:
    return load_profile("smoke", flags={"paths.models": str(folder), **flags}, environ={})


def test_a_record_is_whole_while_its_manifest_and_every_output_are(tmp_path: Path) -> None:
    assert whole(_made(tmp_path / "v0"))


@pytest.mark.parametrize("gone", [MANIFEST, "metrics.jsonl", "checkpoint-4", "checkpoint-4/adapter.bin"])
def test_a_record_without_one_of_its_files_is_not_believed(tmp_path: Path, gone: str) -> None:
    record = _made(tmp_path / "v0")
    path = tmp_path / "v0" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not whole(record)


def test_a_record_whose_output_changed_without_its_size_is_not_believed(tmp_path: Path) -> None:
    record = _made(tmp_path / "v0")
    (tmp_path / "v0" / "checkpoint-4" / "adapter.bin").write_text("WEIGHTS")
    assert not whole(record)


def test_a_record_whose_folder_now_holds_a_result_of_other_inputs_is_not_believed(tmp_path: Path) -> None:
    record = _made(tmp_path / "data", "first")
    assert whole(_made(tmp_path / "data", "second"))
    assert not whole(record)


@pytest.mark.parametrize("record", [None, "text", {"step": "sft"}])
def test_a_record_that_is_no_step_result_is_not_believed(record: Any) -> None:
    assert not whole(record)


def test_the_key_is_stable_and_a_file_name(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    key = step_key(_profile(tmp_path), "sft", {"rows": rows})
    assert key == step_key(_profile(tmp_path), "sft", {"rows": rows})
    assert "/" not in key
    assert key.startswith("sft-")


def test_the_key_follows_content_profile_model_and_step(tmp_path: Path) -> None:
    rows, adapter, model = (
        tmp_path / "rows.jsonl",
        tmp_path / "adapter",
        tmp_path / "smoke-qwen3-1m" / "model.safetensors",
    )
    write_atomic(rows, "{}\n")
    write_atomic(adapter / "adapter.bin", "one")
    arguments: dict[str, Any] = {"rows": rows, "adapters": {"sft": adapter}, "query": None}
    keys = [step_key(_profile(tmp_path), "grpo", arguments)]
    rows.write_text("{}\n{}\n")
    keys.append(step_key(_profile(tmp_path), "grpo", arguments))
    (adapter / "adapter.bin").write_text("two")
    keys.append(step_key(_profile(tmp_path), "grpo", arguments))
    keys.append(step_key(_profile(tmp_path), "grpo", arguments | {"query": "why?"}))
    keys.append(step_key(_profile(tmp_path, seed=7), "grpo", arguments))
    keys.append(step_key(_profile(tmp_path), "sft", arguments))
    write_atomic(model, "weights")
    keys.append(step_key(_profile(tmp_path), "grpo", arguments))
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_follow_what_the_step_itself_writes(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    before = step_key(_profile(tmp_path), "export", {"out": out})
    write_atomic(out, "{}\n")
    assert step_key(_profile(tmp_path), "export", {"out": out}) == before


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (SandboxError("hiccup"), True),
        (SandboxGone("died"), True),
        (SandboxUnavailable("no bubblewrap"), False),
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("slow"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (Interrupted("crashed"), True),
        (UserError("a typo"), False),
        (WorkFailed("exit code 1"), False),
        (ValueError("a bug"), False),
        (OSError(28, "No space left on device"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(error: BaseException, again: bool) -> None:
    assert transient(error) is again
