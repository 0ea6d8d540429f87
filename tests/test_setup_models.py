"""Provisioning of models: whole or named as damaged; ModelScope's real client against a local hub; the generated model's bytes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from model_hub import Hub, serving

from configs.errors import UserError
from training import models

ROOT = Path(__file__).resolve().parents[1]
TRAIN_PYTHON = ROOT / ".venv-train" / "bin" / "python"
PROVISION = """
import sys
from pathlib import Path
from configs.errors import UserError, WorkFailed
from training.models import provision
try:
    provision(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
except (UserError, WorkFailed) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def safetensors(floats: int) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [floats], "data_offsets": [0, 4 * floats]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * floats)


FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": safetensors(500_000),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder of somebody else's, without our manifest."""
    target = tmp_path / "theirs"
    target.mkdir()
    for name, data in FILES.items():
        (target / name).write_bytes(data)
    return target


def in_train_env(source: str, model: str, target: Path, hub: Hub | None = None) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MODELSCOPE_CACHE": str(target.parent / "cache"),
        "MODELSCOPE_ENDPOINT": hub.url if hub else "",
    }
    command = [str(TRAIN_PYTHON), "-c", PROVISION, source, model, str(target)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = child.communicate(timeout=240)
    return child.returncode, said


def test_a_whole_folder_passes_and_a_missing_one_names_the_command(folder: Path, tmp_path: Path) -> None:
    models.check_model(folder)
    with pytest.raises(UserError, match=r"nowhere: no such model folder; .*download_model\.py"):
        models.check_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        (
            "model.safetensors",
            FILES["model.safetensors"][:-1],
            r"model\.safetensors: 2000\d+ bytes instead of 2000\d+, the file is cut",
        ),
        ("model.safetensors", b"\xff" * 64, r"model\.safetensors: .* cut or damaged"),
        ("model.safetensors", None, r"no \*\.safetensors file"),
        ("config.json", b"{", r"config\.json: not JSON"),
        ("config.json", None, r"config\.json: missing"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-00002.safetensors"}}',
            r"model-00002\.safetensors: missing \(1 of 1 shards are\)",
        ),
    ],
)
def test_damage_in_a_foreign_folder_is_named_by_file(
    folder: Path, name: str, data: bytes | None, sentence: str
) -> None:
    if data is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=sentence):
        models.check_model(folder)


def test_with_a_manifest_one_changed_byte_of_equal_size_is_found_and_named(folder: Path) -> None:
    models.write_manifest(folder, "acme/tiny", "modelscope")
    models.check_model(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"model\.safetensors: its content is not what was provisioned"):
        models.provision("modelscope", "acme/tiny", folder)


def test_a_local_path_is_checked_and_linked_not_copied_and_an_own_folder_is_never_replaced(
    folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "models" / "mine"
    models.provision("path", str(folder), target)
    assert target.resolve() == folder
    models.provision("path", str(folder), target)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: missing"):
        models.provision("path", str(folder), target)
    (folder / "config.json").write_bytes(FILES["config.json"])
    (tmp_path / "models" / "other").mkdir()
    with pytest.raises(UserError, match="exists already and is not a link"):
        models.provision("path", str(folder), tmp_path / "models" / "other")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/model", "a/b/c", "word"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(UserError, match="neither a folder here nor a hub id"):
        models.provision_for(None, model)


def test_an_unknown_source_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one of generate, modelscope, path, smollm2-wheel"):
        models.provision("torrent", "x/y", tmp_path / "m")


def test_too_little_room_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GB free, Qwen needs 1000000000\.0 GB"):
        models.check_room(tmp_path, 10**18, "Qwen")


@pytest.mark.slow  # 10 s each: modelscope's import in the train environment
def test_modelscopes_client_resumes_a_dropped_connection_where_it_broke(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    with serving(Hub(FILES, cut={"model.safetensors": 1})) as hub:
        assert finish(in_train_env("modelscope", "acme/tiny", target, hub))[0] == 0
        ranges = [wanted for name, wanted in hub.requests if name == "model.safetensors"]
        fetched = len(hub.requests)
        assert finish(in_train_env("modelscope", "acme/tiny", target, hub))[0] == 0
        assert len(hub.requests) == fetched, "a whole model is not asked for again"
    assert ranges == ["", f"bytes={len(FILES['model.safetensors']) // 2}-"]
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    models.check_model(target)


@pytest.mark.slow
def test_a_download_killed_half_way_is_recognised_and_finished(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    with serving(Hub(FILES, hang={"model.safetensors"})) as hub:
        child = in_train_env("modelscope", "acme/tiny", target, hub)
        deadline = time.monotonic() + 120
        while not (target / "config.json").exists() or not any(name == "model.safetensors" for name, _ in hub.requests):
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.1)
        child.kill()
        child.communicate()
        hub.hang.clear()
        with pytest.raises(UserError):
            models.check_model(target)
        assert not models.complete(target)
        hub.requests.clear()
        code, said = finish(in_train_env("modelscope", "acme/tiny", target, hub))
        assert code == 0, said
        assert "config.json" not in [name for name, _ in hub.requests], "what was whole is not fetched again"
    models.check_model(target)


@pytest.mark.slow
def test_a_file_whose_digest_is_not_the_hubs_is_refused_by_name(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    with serving(Hub(FILES, lie={"model.safetensors"})) as hub:
        code, said = finish(in_train_env("modelscope", "acme/tiny", target, hub))
    assert code == 1
    assert "WorkFailed: acme/tiny could not be fetched from http://127.0.0.1" in said
    assert "Hash mismatch for model.safetensors" in said
    assert not models.complete(target)


@pytest.mark.slow
def test_an_unreachable_hub_is_one_sentence(tmp_path: Path) -> None:
    code, said = finish(in_train_env("modelscope", "acme/tiny", tmp_path / "tiny", Hub({}, url="http://127.0.0.1:9")))
    assert code == 1
    assert "acme/tiny could not be fetched from http://127.0.0.1:9" in said
    assert "Traceback" not in said


@pytest.mark.slow  # two generations of about 10 s, side by side
def test_the_smoke_model_is_small_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    children = [in_train_env("generate", "agentexecutor/smoke", tmp_path / name) for name in ("a", "b")]
    assert [finish(child)[0] for child in children] == [0, 0]
    first, second = (
        {p.name: p.read_bytes() for p in (tmp_path / n).iterdir() if p.name != models.MANIFEST} for n in ("a", "b")
    )
    assert first == second
    config = json.loads(first["config.json"])
    assert config["model_type"] == "qwen3"
    assert 4_000_000 <= len(first["model.safetensors"]) <= 8_000_000  # 1 to 2 million float32 parameters
    tokenizer = json.loads(first["tokenizer.json"])
    stop = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}["<|im_end|>"]
    assert (config["eos_token_id"], config["pad_token_id"]) == (stop, 0)
    assert {"<tool_call>", "</tool_call>", "<tool_response>"} <= {
        token["content"] for token in tokenizer["added_tokens"]
    }


def test_the_laptop_model_stops_at_the_end_of_a_turn_and_is_whole() -> None:
    folder = ROOT / "models" / "SmolLM2-135M-Instruct"
    models.check_model(folder)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, 0)
    assert (tokenizer["eos_token"], tokenizer["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config


def test_download_model_runs_itself_in_the_train_environment_and_costs_little_when_done() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "download_model.py"), "--profile", "laptop"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "HuggingFaceTB/SmolLM2-135M-Instruct: whole in" in done.stdout
