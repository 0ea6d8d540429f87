"""The evaluate step with real episodes in real local sandboxes, a real supervised child and real HTTP; only the model is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stand_in_swift

from agents.task import load_tasks
from configs.errors import UserError, WorkFailed
from configs.load import ROOT, dump_profile, load_profile
from configs.run import Layout, Progress, Run
from training.evaluate import evaluate, settings
from training.keeper import descendants
from training.results import read_results
from training.serve import command, serve

HELDOUT = ROOT / "datasets" / "laptop" / "heldout.jsonl"


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header, data = {}, b""
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += bytes(size)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def make_adapter(folder: Path, width: int = 8) -> Path:
    folder.mkdir(parents=True)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    safetensors(folder / "adapter_model.safetensors", {f"{name}A.weight": [2, width], f"{name}B.weight": [width, 2]})
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "tiny", "r": 2}))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    safetensors(model / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": [8, 8]})
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    (tmp_path / "heldout.jsonl").write_text("".join(HELDOUT.read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setenv("STAND_IN_TASKS", str(tmp_path / "heldout.jsonl"))
    monkeypatch.setenv("STAND_IN_SOLVED", "script,directory")
    flags = {
        "paths.output": tmp_path / "output",
        "paths.models": tmp_path / "models",
        "paths.train_python": stand_in_swift.install(tmp_path / "train"),
        "model.folder": "tiny",
        "evaluate.concurrency": 3,
    }
    seen: list[Progress] = []
    yield Run(load_profile("smoke", flags=flags, environ={}), "test-run", seen.append)
    assert [pid for pid in descendants(1) if "stand_in_swift" in cmdline(pid)] == []


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "sft" / "v0-20260101-000000" / "checkpoint-2")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return tmp_path / "heldout.jsonl"


def test_policies_act_on_every_task_and_what_they_did_is_judged(run: Run, tasks: Path, adapter: Path) -> None:
    adapter.parent.joinpath("metrics.jsonl").write_text('{"step": 1.0, "loss": 2.5}\n')
    result = evaluate(run, tasks, {"sft": adapter})
    report = json.loads(result.outputs["report"].read_text())
    assert [(p["name"], p["passes"], p["attempts"]) for p in report["policies"]] == [("base", 0, 3), ("sft", 2, 3)]
    assert {r.task: r.verdict for r in read_results(result.outputs["results"]) if r.policy == "sft"} == {
        "heldout-000-script": "passed",
        "heldout-001-function": "failed",
        "heldout-002-directory": "passed",
    }
    assert report["differences"][0]["difference"] == pytest.approx(2 / 3)
    assert report["policies"][1]["stop_reasons"] == {"finished": 3}
    (took,) = report["time"]  # nothing is known of a training elsewhere
    assert (took["step"], set(took["phases"])) == ("evaluation", {"start-up", "generation", "tools", "grading"})
    assert 0 < sum(took["phases"].values()) <= took["seconds"] + 0.3  # rounded to tenths
    assert result.summary["peak_memory_gib"] == took["peak_memory_gib"] > 0
    assert "sft: loss" in result.outputs["html"].read_text()
    assert str(ROOT) not in result.outputs["report"].read_text()
    again = evaluate(run, tasks, {"sft": adapter})
    assert again.reused
    assert again.digest == result.digest


def test_a_server_that_dies_fails_the_step_and_the_next_call_runs_only_the_rest(
    run: Run, tasks: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEHAVIOURS 19."""
    monkeypatch.setenv("STAND_IN_DIES_AFTER", "6")
    with pytest.raises(WorkFailed, match="no memory left"):
        evaluate(run, tasks, {"sft": adapter})
    kept = list((Layout(run.profile).evaluate / "episodes").rglob("*.json"))
    assert 3 <= len(kept) < 6
    assert not list(Layout(run.profile).evaluate.glob("v*"))
    kept[0].write_text(kept[0].read_text()[:100])  # and one of them is damaged
    monkeypatch.delenv("STAND_IN_DIES_AFTER")
    report = json.loads(evaluate(run, tasks, {"sft": adapter}).outputs["report"].read_text())
    assert report["reused_episodes"] == len(kept) - 1
    assert report["policies"][1]["passes"] == 2


def test_another_adapter_costs_only_its_own_episodes(run: Run, tasks: Path, adapter: Path, tmp_path: Path) -> None:
    evaluate(run, tasks, {"sft": adapter})
    other = make_adapter(tmp_path / "grpo" / "v0-20260101-000000" / "checkpoint-1")
    (other / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny", "r": 2, "lora_alpha": 5}')
    report = json.loads(evaluate(run, tasks, {"sft": adapter, "grpo": other}).outputs["report"].read_text())
    assert report["reused_episodes"] == 6
    assert [p["name"] for p in report["policies"]] == ["base", "sft", "grpo"]


def test_the_seed_decides_only_what_is_sampled(run: Run, tasks: Path, adapter: Path) -> None:
    evaluate(run, tasks, {"sft": adapter})
    assert evaluate(with_seed(run, 7), tasks, {"sft": adapter}).reused
    assert "seed" not in settings(run.profile)
    warm = run.profile.evaluate.model_copy(update={"temperature": 1.0})
    assert settings(run.profile.model_copy(update={"evaluate": warm}))["seed"] == run.profile.seed


def with_seed(run: Run, seed: int) -> Run:
    return Run(run.profile.model_copy(update={"seed": seed}), run.run_id)


def test_a_failure_of_the_infrastructure_is_not_scored_and_is_tried_again_by_the_next_call(
    run: Run, tasks: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BEHAVIOURS 1 and 30."""
    script = load_tasks(tasks)[0]
    monkeypatch.setenv("STAND_IN_FAILS_ON", script.prompt)
    first = json.loads(evaluate(run, tasks, {"sft": adapter}).outputs["report"].read_text())
    assert [(p["attempts"], p["passes"], p["not_scored"]) for p in first["policies"]] == [(2, 0, 1), (2, 1, 1)]
    assert first["policies"][0]["stop_reasons"]["infra_error"] == 1
    monkeypatch.delenv("STAND_IN_FAILS_ON")
    second = json.loads(evaluate(run, tasks, {"sft": adapter}).outputs["report"].read_text())
    assert [(p["attempts"], p["not_scored"]) for p in second["policies"]] == [(3, 0), (3, 0)]
    assert second["reused_episodes"] == 4


@pytest.mark.slow  # about 5 s each on an idle machine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_killed_leaves_no_process_and_the_next_one_goes_on(
    run: Run, tasks: Path, adapter: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """BEHAVIOURS 3 and 19. The fixture looks for the server; sandboxes are looked for here."""
    (tmp_path / "killed.yaml").write_text(dump_profile(run.profile))
    arguments = [
        "evaluate",
        "--profile",
        str(tmp_path / "killed.yaml"),
        "--tasks",
        str(tasks),
        "--adapter",
        f"sft={adapter}",
        "--json",
    ]
    command = [sys.executable, "-m", "agentexecutor", *arguments]
    episodes = Layout(run.profile).evaluate / "episodes"
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=slow()
    ) as process:
        wait_for(lambda: len(list(episodes.rglob("*.json"))) >= 3, 60)
        children = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(30) != 0
    wait_for(lambda: not [pid for pid in children if cmdline(pid)], 30)
    kept = len(list(episodes.rglob("*.json")))
    assert 3 <= kept < 6
    assert json.loads(evaluate(run, tasks, {"sft": adapter}).outputs["report"].read_text())["reused_episodes"] == kept


def slow() -> dict[str, str]:
    return {**os.environ, "STAND_IN_SECONDS": "0.7"}


def wait_for(what: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_a_heldout_task_that_is_also_trained_on_is_refused_before_anything_starts(run: Run, adapter: Path) -> None:
    with pytest.raises(UserError, match="also in the training split"):
        evaluate(run, run.profile.collect.tasks, {"sft": adapter})


def test_an_adapter_of_another_model_is_refused_by_name(run: Run, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made for another model"):
        evaluate(run, tasks, {"sft": make_adapter(tmp_path / "other" / "checkpoint-1", width=16)})


def test_an_adapter_that_the_server_refuses_is_named_with_its_reason(
    run: Run, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_REFUSES", "sft")
    with pytest.raises(WorkFailed, match=r"cannot use 'sft'.*rank 64 is too large"), serve(run, {"sft": adapter}):
        pass


def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """BEHAVIOURS 20."""
    monkeypatch.setenv("STAND_IN_CRASHES", "1")
    with pytest.raises(WorkFailed, match=r"(?s)exit code 3.*Free memory on device is less"), serve(run, {}):
        pass


def test_a_port_that_is_taken_is_said_in_one_sentence(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken"), serve(run, {}, port=port):
            pass


def test_a_server_is_gone_after_an_error_inside_the_block(run: Run) -> None:
    """BEHAVIOURS 3: the fixture looks at the process table."""

    def fail() -> None:
        with serve(run, {}) as server:
            server.check()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_server_that_is_not_ready_in_time_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """BEHAVIOURS 4."""
    monkeypatch.setenv("STAND_IN_HANGS", "1")
    with pytest.raises(WorkFailed, match=r"(?s)not ready within 1 s.*loading for ever"), serve(run, {}, ready_s=1.0):
        pass


@pytest.mark.parametrize(("name", "path"), [("base", "x"), ("Upper case", "x"), ("sft", "a=b/checkpoint-1")])
def test_an_adapter_that_cannot_be_served_is_refused_before_the_start(run: Run, name: str, path: str) -> None:
    with pytest.raises(UserError):
        command(run, {name: Path(path)}, 8000)
