"""Steps that write small files and real manifests, in the place of agents and trainers: what the flows see of a step, without its hours.

A file `trouble/<step>` below the data folder makes that step meet the named trouble once: `sandbox` (an infrastructure failure), `work` (the work
failed), `user` (a mistake of the user) or `hang` (it starts a child of its own and waits for it).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from agents.task import Task, Verifier
from configs.errors import UserError, WorkFailed
from configs.files import digest_file, digest_json, write_atomic, write_json
from configs.manifest import Step, StepResult, run_step
from configs.run import Layout, Run
from sandboxes.base import SandboxError
from tasks_lib.steps import STEPS, Entry
from training.launch import Command
from training.supervise import run_child


def _table() -> dict[Step, Entry]:
    names = {"rl-prepare": "prepare"}
    return {
        step: Entry(f"light_steps:{names.get(step, step)}", STEPS[step].gpu, STEPS[step].manifest)
        for step in get_args(Step)
    }


TABLE = _table()
"""Goes into `tasks_lib.steps.using`."""


def task_line(name: str) -> str:
    """A file of one task: the pipeline reads its task files before anything else."""
    return Task(id=name, prompt=f"do {name}", verifier=Verifier(command="true")).model_dump_json() + "\n"


def collect(run: Run, tasks: Path) -> StepResult:
    out = Layout(run.profile).trajectories
    return _step(
        run,
        "collect",
        {"tasks": tasks},
        out.parent,
        {"trajectories": out},
        {"episodes": 3, "passed": 2, "not_scored": 1},
    )


def export(run: Run, trajectories: Path, heldout: Path, out: Path) -> StepResult:
    outputs = {"rows": out, "report": out.with_name("report.json")}
    return _step(
        run,
        "export",
        {"trajectories": trajectories, "heldout": heldout},
        out.parent,
        outputs,
        {"kept": 2, "dropped": {"failed": 1, "duplicate": 3}},
    )


def sft(run: Run, rows: Path) -> StepResult:
    return _versioned(
        run,
        "sft",
        {"rows": rows},
        Layout(run.profile).sft,
        {"adapter": "checkpoint-4", "metrics": "metrics.jsonl"},
        {"loss": 0.25},
    )


def prepare(run: Run, tasks: Path, out: Path) -> StepResult:
    return _step(
        run,
        "rl-prepare",
        {"tasks": tasks},
        out.parent,
        {"rows": out, "report": out.with_name("report.json")},
        {"rows": 4},
    )


def grpo(run: Run, rows: Path, adapter: Path | None) -> StepResult:
    assert adapter is not None
    inputs = {"rows": rows, "adapter": adapter / "adapter.bin"}
    return _versioned(
        run,
        "grpo",
        inputs,
        Layout(run.profile).grpo,
        {"adapter": "checkpoint-2", "metrics": "metrics.jsonl"},
        {"reward": 0.75},
    )


def evaluate(run: Run, tasks: Path, adapters: dict[str, Path]) -> StepResult:
    inputs = {"tasks": tasks} | {f"adapter {name}": path / "adapter.bin" for name, path in adapters.items()}
    names = {"results": "results.parquet", "report": "report.json", "markdown": "report.md", "html": "report.html"}
    summary = {"pass_rate": {"base": 0.0, "sft": 0.5, "grpo": 0.75}}
    return _versioned(run, "evaluate", inputs, Layout(run.profile).evaluate, names, summary)


def infer(run: Run, adapters: dict[str, Path], query: str | None, queries: Path | None) -> StepResult:
    inputs = {f"adapter {name}": path / "adapter.bin" for name, path in adapters.items()}
    return _versioned(
        run, "infer", inputs, Layout(run.profile).infer, {"inference": "inference.jsonl"}, {"answer": query or ""}
    )


def demo(run: Run, trajectories: Path, rows: Path, inference: Path, report: Path, out: Path) -> StepResult:
    inputs = {"trajectories": trajectories, "rows": rows, "inference": inference, "report": report}
    return _step(run, "demo", inputs, out, {"bundle": out / "validation_report.json"}, {"files": 1})


def _step(
    run: Run, step: Step, inputs: dict[str, Path], folder: Path, outputs: dict[str, Path], summary: dict[str, Any]
) -> StepResult:
    return _run(run, step, inputs, lambda: [folder], lambda: (folder, outputs, summary))


def _versioned(
    run: Run, step: Step, inputs: dict[str, Path], parent: Path, names: dict[str, str], summary: dict[str, Any]
) -> StepResult:
    def fresh() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        folder = parent / f"v{len(list(parent.glob('v*')))}-{time.strftime('%Y%m%d-%H%M%S')}"
        return folder, {name: folder / file for name, file in names.items()}, summary

    return _run(run, step, inputs, lambda: sorted(parent.glob("v*"), reverse=True), fresh)


def _run(
    run: Run,
    step: Step,
    inputs: dict[str, Path],
    candidates: Callable[[], list[Path]],
    plan: Callable[[], tuple[Path, dict[str, Path], dict[str, Any]]],
) -> StepResult:
    digests = {name: digest_file(path) for name, path in inputs.items()} | {"seed": digest_json(run.profile.seed)}

    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        run.progress(step, 0, 2, "starting")
        run.event("called", step=step, inputs={name: str(path) for name, path in inputs.items()}, digests=digests)
        _trouble(run, step)
        run.event("made", step=step)
        folder, outputs, summary = plan()
        for name, path in outputs.items():
            text = f"{step} {name} {digest_json(digests)}\n"
            if name == "adapter":
                write_atomic(path / "adapter.bin", text)
            elif path.suffix == ".json":
                write_json(path, {"text": text})
            else:
                write_atomic(path, text)
        run.progress(step, 2, 2, "done", loss=0.5)
        return folder, outputs, summary

    return run_step(step, version=1, inputs=digests, candidates=candidates, make=make, force=step in run.force)


def _trouble(run: Run, step: Step) -> None:
    file = Layout(run.profile).data / "trouble" / step
    if not file.is_file():
        return
    kind = file.read_text().strip()
    file.unlink()
    if kind == "sandbox":
        raise SandboxError("the sandbox vanished")
    if kind == "work":
        raise WorkFailed("the trainer ended with exit code 3")
    if kind == "user":
        raise UserError("the rows file holds no row")
    pid = file.with_name(f"{step}.pid")
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    run_child(Command([sys.executable, "-c", code]), run.log(step))
