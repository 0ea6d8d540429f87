"""Run one ms-swift training to its end and read what it says: progress with time left, metrics.jsonl, and the checkpoint it promises."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from configs.files import read_jsonl, write_jsonl
from configs.run import Run
from training import checkpoints
from training.clock import Steps
from training.launch import Command
from training.metrics import Logged, Watch, from_record, row, time_left
from training.probe import heard
from training.supervise import run_child

METRICS: Final = "metrics.jsonl"
STALL_S: Final = 3600.0
"""Seconds without any output after which a training counts as hung; the longest silence is one step, or loading a large model."""

SHOWN: Final = {"loss": "loss"}

Metric = dict[str, float]


@dataclass(frozen=True)
class Trained:
    adapter: Path
    """The last checkpoint, of the last step."""
    steps: int
    rows: list[Metric]
    """What metrics.jsonl holds: one row a step, over all resumed parts."""
    peak_bytes: int
    time: dict[str, float]
    """Seconds of this run by phase (training/clock.py)."""


def train(
    run: Run,
    step: Literal["sft", "grpo"],
    command: Command,
    version: Path,
    resume: Path | None,
    *,
    shown: Mapping[str, str] = SHOWN,
    on_step: Callable[[Logged], None] | None = None,
) -> Trained:
    """Train in `version`, from `resume` where given.

    `shown` maps a figure of the progress to ms-swift's key. `on_step` sees every logged step and may raise to stop. Raises `WorkFailed` with the
    log's tail for a failure, a loss that is no number, several trainings instead of one, or an end without the last step's checkpoint (or that of the step
    after which the trainer said it would stop).
    """
    metrics = version / METRICS
    started = int(resume.name.rpartition("-")[2]) if resume else 0
    before = _before(version, started)
    write_jsonl(metrics, before)  # steps after the checkpoint happen again
    if resume and step == "sft" and checkpoints.finished(resume):  # transformers would train one step more
        return Trained(resume, started, before, 0, {})
    clock = Steps()
    watch = Watch(step, run.profile.hardware.nproc * run.profile.hardware.nnodes)

    stopped: list[int] = []

    def told(said: dict[str, Any]) -> None:
        """Pass on what the trainer itself has to say; a stop that it announces is no early end."""
        kind, note = str(said.pop("kind")), str(said.pop("note"))
        stopped.extend([int(said["at"])] if kind == "stop" else [])
        run.event(kind, step=step, note=note, **said)
        at = watch.steps[-1] if watch.steps else None
        figures = {"validation": float(said["pass_rate"])} if "pass_rate" in said else {}
        run.progress(step, at.step if at else started, at.max_steps if at else 0, note, **figures)

    def line(text: str) -> None:
        clock.heard(text)
        if (said := heard(text)) is not None:
            told(said)
        logged = watch.line(text)
        if logged is None or not logged.step:
            return
        logged.values.update(clock.step(logged.values.get("train_speed(s/it)")))
        _append(metrics, watch.rows()[-1])
        figures = {name: logged.values[key] for name, key in shown.items() if key in logged.values}
        run.progress(step, logged.step, logged.max_steps, time_left(logged.seconds_left), **figures)
        if on_step is not None:
            on_step(logged)

    def missing() -> str | None:
        found = checkpoints.checkpoints(version)
        last = stopped[0] if stopped else watch.steps[-1].max_steps if watch.steps else started
        if not found:
            return f"there is no checkpoint in {version}"
        if found[0].name != f"checkpoint-{last}":
            return f"its last checkpoint is {found[0].name}, not that of step {last}"
        return checkpoints.broken(found[0])

    done = run_child(command, run.log(step), name=step, on_line=line, expect=missing, stall_s=STALL_S)
    adapter = checkpoints.checkpoints(version)[0]
    return Trained(adapter, int(adapter.name.rpartition("-")[2]), before + watch.rows(), done.peak_bytes, clock.end())


def _before(version: Path, last: int) -> list[Metric]:
    """Rows of the steps up to `last` of an interrupted run.

    Where we were killed together with the trainer, steps that we had not read yet stand only in ms-swift's own file, whose last line may be cut.
    """
    known: dict[float, Metric] = {}
    theirs = version / "logging.jsonl"
    for line in theirs.read_text(encoding="utf-8", errors="replace").splitlines() if theirs.is_file() else []:
        with suppress(ValueError):
            record = json.loads(line)
            logged = from_record(record) if isinstance(record, dict) else None
            if logged is not None and logged.step:
                known[float(logged.step)] = row(logged)
    for ours in read_jsonl(version / METRICS) if (version / METRICS).is_file() else []:
        known[ours["step"]] = ours
    return [known[step] for step in sorted(known) if step <= last]


def _append(file: Path, row: Metric) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row) + "\n").encode())
    finally:
        os.close(handle)
