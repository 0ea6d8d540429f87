"""A real GRPO run whose adapter is doubled, and one that is killed in the middle."""

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
from configs.load import ROOT
from configs.run import Layout
from tests.grpo_kit import start
from training import grpo

MAIN = """
import sys
from pathlib import Path
from configs.load import load_profile
from configs.run import Run
from training import grpo
run = Run(load_profile(sys.argv[1], environ={}), "killed")
(run.folder).mkdir(parents=True, exist_ok=True)
(run.folder / "profile.yaml").write_text(Path(sys.argv[1]).read_text())
grpo.grpo(run, Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.nightly  # 80 s
def test_an_adapter_that_is_doubled_stops_the_run_with_that_reason(tmp_path: Path) -> None:
    plugin = str(ROOT / "tests/in_train_env/doubled_plugin.py")
    run, rows, adapter = start(tmp_path, "smoke", **{"grpo.extra": {"external_plugins": [plugin]}})
    with pytest.raises(WorkFailed, match="stale or doubled adapter"):
        grpo.grpo(run, rows, adapter)


@pytest.mark.nightly  # 150 s
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    run, rows, adapter = start(tmp_path, "smoke", **{"grpo.max_steps": 3})
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(run.folder / "profile.yaml"), str(rows), str(adapter)], cwd=ROOT
    )
    (folder,) = _wait(lambda: list(Layout(run.profile).grpo.glob("v0-*/checkpoint-1/trainer_state.json")), child)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    time.sleep(20)  # the keeper ends the tree within its grace
    result = grpo.grpo(run, rows, adapter)
    assert result.folder == folder.parent.parent
    assert result.summary["resumed_from"] in ("checkpoint-1", "checkpoint-2")
    assert [row["step"] for row in read_jsonl(result.outputs["metrics"])] == [1.0, 2.0, 3.0]
    steps = [
        json.loads(line)["extra"]["step"]
        for line in (result.outputs["rollouts"] / "rank0.jsonl").read_text().splitlines()
    ]
    assert steps == [1] * 4 + [2] * 4 + [3] * 4

    (result.folder / "manifest.json").unlink()  # killed in the probe of the last checkpoint
    probes = read_jsonl(result.outputs["probes"])
    write_jsonl(result.outputs["probes"], probes[:-1])
    again = grpo.grpo(run, rows, adapter)
    assert again.outputs == result.outputs
    assert again.summary["resumed_from"] == "checkpoint-3"
    assert [row["step"] for row in read_jsonl(again.outputs["metrics"])] == [1.0, 2.0, 3.0]
    assert [probe["results"] for probe in read_jsonl(again.outputs["probes"])] == [probe["results"] for probe in probes]


def _wait(look: object, child: subprocess.Popen[bytes]) -> list[Path]:
    end = time.monotonic() + 400
    while time.monotonic() < end and child.poll() is None:
        found: list[Path] = look()  # type: ignore[operator]
        if found:
            return found[:1]
        time.sleep(0.5)
    raise AssertionError(f"no checkpoint; exit {child.poll()}")
