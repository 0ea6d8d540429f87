"""The offline smoke pipeline: collect → export → sft → rl-prepare → grpo → evaluate → infer → demo on real parts, in one process.

    python tests/test_offline_pipeline.py

Two cores, no GPU, no key, no network: a random 1–2M-parameter model goes through torchrun, ms-swift, vLLM colocate and real sandboxes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from configs.load import dump_profile, load_profile  # noqa: E402

STEPS = ["collect", "export", "sft", "rl-prepare", "grpo", "evaluate", "infer", "demo"]
PHASES = {
    "sft": {"start-up", "training"},
    "grpo": {"start-up", "generation", "tools", "grading", "training"},
    "evaluate": {"start-up", "generation", "tools", "grading"},
}


def smoke_profile(folder: Path, name: str = "smoke") -> Path:
    """A copy of a shipped profile that writes below `folder` only."""
    raw = yaml.safe_load(dump_profile(load_profile(name, environ={})))
    raw["paths"] |= {"data": str(folder / "data"), "output": str(folder / "output"), "demo": str(folder / "demo")}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def run_all(profile: Path) -> tuple[list[dict[str, Any]], float]:
    """`agentexecutor all` as a user runs it; returns the steps' results and the seconds it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "agentexecutor", "all", "--profile", str(profile), "--json"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, f"exit {done.returncode}"
    steps: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["steps"]
    return steps, time.monotonic() - started


@pytest.mark.slow
def test_the_smoke_pipeline_runs_whole_and_a_second_run_reuses_every_step(tmp_path: Path) -> None:
    profile = smoke_profile(tmp_path)
    steps, seconds = run_all(profile)
    assert [s["step"] for s in steps] == STEPS
    assert not any(s["reused"] for s in steps)
    by_name = {s["step"]: s for s in steps}
    assert (Path(by_name["grpo"]["outputs"]["adapter"]) / "adapter_model.safetensors").stat().st_size > 0
    report = json.loads(Path(by_name["evaluate"]["outputs"]["report"]).read_text())
    assert [p["name"] for p in report["policies"]] == ["base", "sft", "grpo"]
    for step, phases in PHASES.items():
        took = by_name[step]["summary"]["time"]
        assert phases <= took.keys()
        assert 0 < sum(took.values()) <= by_name[step]["seconds"] + 0.5  # rounded to tenths
    answers = [json.loads(line) for line in Path(by_name["infer"]["outputs"]["inference"]).read_text().splitlines()]
    assert [a["policy"] for a in answers] == ["base", "sft", "grpo"]
    print(f"smoke pipeline: {seconds:.0f} s")
    again, seconds = run_all(profile)
    assert [s["step"] for s in again if not s["reused"]] == []
    assert {s["step"]: s["digest"] for s in again} == {s["step"]: s["digest"] for s in steps}
    print(f"unchanged: {seconds:.0f} s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        test_the_smoke_pipeline_runs_whole_and_a_second_run_reuses_every_step(Path(place))
