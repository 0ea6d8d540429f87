"""SFT on the real ms-swift: flags, tokens, and two real trainings of the smoke model. BEHAVIOURS 11, 13 and 19."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.errors import WorkFailed
from configs.files import read_jsonl, write_jsonl
from configs.load import ROOT, load_profile
from configs.run import Layout, Run, new_run
from tests.train_env import INSIDE, provision, run_inside
from training.arguments import Job, infer_command
from training.checkpoints import checkpoints, last_whole, newest_adapter, versions
from training.environment import environment
from training.infer import QUERIES, infer
from training.metrics import parse
from training.sft import sft
from training.supervise import GRACE_S

TOOLS = json.dumps([{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {}}}])


@pytest.mark.slow  # 25 s: imports torch and ms-swift once
def test_flags_and_tokens_are_ms_swifts_own() -> None:
    provision("smoke")
    run_inside("test_training_swift.py")


def rows(count: int = 8) -> list[dict[str, object]]:
    return [
        {
            "tools": TOOLS,
            "messages": [
                {"role": "user", "content": f"Print {number}."},
                {
                    "role": "tool_call",
                    "content": json.dumps({"name": "bash", "arguments": {"command": f"echo {number}"}}),
                },
                {"role": "tool_response", "content": f"exit_code: 0\n{number}"},
                {"role": "assistant", "content": "Done."},
            ],
            "task_id": f"t{number}",
            "task_digest": f"{number:016x}",
        }
        for number in range(count)
    ]


def start(tmp_path: Path, profile: str = "smoke", **flags: object) -> tuple[Run, Path]:
    provision(profile)
    given = {
        "paths.output": str(tmp_path / "output"),
        **{key.replace("__", "."): value for key, value in flags.items()},
    }
    write_jsonl(tmp_path / "train.jsonl", rows())
    return new_run(load_profile(profile, environ={}, flags=given)), tmp_path / "train.jsonl"


INTERRUPTED = """
import sys
from pathlib import Path
from configs.load import load_profile
from configs.run import new_run
from training.sft import sft
run = new_run(load_profile("smoke", environ={}, flags={"paths.output": sys.argv[1], "sft.max_steps": 40, "sft.save_steps": 2}))
sft(run, Path(sys.argv[2]))
"""


@pytest.mark.slow  # 80 s: two trainings of the smoke model and two inferences
def test_a_training_killed_with_9_leaves_no_process_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run, data = start(tmp_path, sft__max_steps=40, sft__save_steps=2)
    folder = Layout(run.profile).sft
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "output"), str(data)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    end = time.monotonic() + 300
    while not (versions(folder) and last_whole(versions(folder)[0])):
        assert child.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    end = time.monotonic() + GRACE_S + 5
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]:
        assert time.monotonic() < end, "the trainer outlived its supervisor by more than the grace"
        time.sleep(0.2)
    assert not list(folder.glob("v*/manifest.json"))

    trained = sft(run, data)
    assert len(versions(folder)) == 1
    assert trained.summary["resumed_from"].startswith("checkpoint-")
    assert trained.summary["loss_last"] < trained.summary["loss_first"]
    assert [row["step"] for row in read_jsonl(trained.outputs["metrics"])] == list(range(1, 41))
    assert newest_adapter(folder) == trained.outputs["adapter"] == trained.folder / "checkpoint-40"
    assert sft(run, data).reused

    (trained.folder / "manifest.json").unlink()  # killed after the last checkpoint: nothing is left to train
    again = sft(run, data)
    assert again.outputs == trained.outputs
    assert checkpoints(trained.folder)[0].name == "checkpoint-40"
    assert [row["step"] for row in read_jsonl(again.outputs["metrics"])] == list(range(1, 41))

    asked = infer(run, {"sft": trained.outputs["adapter"]})
    said = read_jsonl(asked.outputs["inference"])
    assert [(row["policy"], row["query"]) for row in said] == [
        (name, run.profile.infer.query) for name in ("base", "sft")
    ]
    assert said[0]["response"] != said[1]["response"]  # the adapter really answered
    assert said[0]["adapter_digest"] == ""
    assert len(said[1]["adapter_digest"]) == 64
    assert infer(run, {"sft": trained.outputs["adapter"]}).reused


@pytest.mark.nightly  # 4 min on busy cores: four starts of `swift infer` and two of ours
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_one_child_answers_as_swift_infer_does_for_each_policy(tmp_path: Path, engine: str) -> None:
    run, _ = start(tmp_path, infer__engine=engine)
    python = run.profile.paths.train_python
    made = tmp_path / "v0" / "checkpoint-1"
    subprocess.run([python, INSIDE / "make_adapter.py", run.profile.model_path, made], check=True, cwd=ROOT)
    write_jsonl(tmp_path / "q.jsonl", [{"query": query} for query in ("Print 3 and the date.", "Hi", "What is 2 + 2?")])
    asked = infer(run, {"sft": made}, queries=tmp_path / "q.jsonl")
    ours = read_jsonl(asked.outputs["inference"])
    for name, adapter in (("base", None), ("sft", made)):
        out = tmp_path / f"{name}.jsonl"
        argv = infer_command(Job(run.profile, rows=asked.folder / QUERIES, output=out)).argv
        argv[argv.index("training.ask")] = "swift.cli.infer"
        argv += ["--adapters", str(adapter)] if adapter else []
        subprocess.run(argv, check=True, cwd=ROOT, env={**os.environ, **environment("infer", run.profile)})
        assert [row["response"] for row in ours if row["policy"] == name] == [r["response"] for r in read_jsonl(out)]
    assert ours[0]["response"] != ours[3]["response"]


@pytest.mark.nightly  # 45 s: two processes on two cores; test_grpo_zero3.py has that topology in the fast tier
def test_two_processes_under_zero3_are_one_training(tmp_path: Path) -> None:
    run, data = start(tmp_path, "smoke-zero3", sft__max_steps=2)
    trained = sft(run, data)
    log = run.log("sft").read_text()
    assert [logged.step for line in log.splitlines() if (logged := parse(line)) and logged.step] == [1, 2]
    assert "world_size: 2" in log
    assert len(list(trained.outputs["adapter"].glob("global_step2/*optim_states.pt"))) == 2


@pytest.mark.slow  # 35 s
def test_two_processes_that_would_train_alone_are_found_out(tmp_path: Path) -> None:
    # Without these flags torchrun starts two trainings that know nothing of each other and write into one folder.
    alone = {"use_cpu": None, "ddp_backend": None, "deepspeed": None, "external_plugins": None}
    run, data = start(tmp_path, "smoke-zero3", sft__extra=alone)
    with pytest.raises(WorkFailed, match=r"logged twice|processes instead of"):
        sft(run, data)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
