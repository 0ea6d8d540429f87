"""A run: the effective profile, an id, where things go, and whom to tell about progress. Every step function takes one."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from configs.files import write_atomic
from configs.load import dump_profile
from configs.profile import Profile


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step is. `total` is 0 while unknown; `metrics` are the newest figures (loss, reward, pass rate, …)."""

    step: str
    done: int
    total: int
    note: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


def silent(progress: Progress) -> None:
    """Whom to tell when nobody watches."""


@dataclass(frozen=True)
class Run:
    profile: Profile
    run_id: str
    report: Callable[[Progress], None] = silent
    force: frozenset[str] = frozenset()
    """Steps that run although a proved result exists."""

    @property
    def folder(self) -> Path:
        """output/<run>/: profile.yaml, events.jsonl, logs/."""
        return self.profile.paths.output / self.run_id

    def log(self, name: str) -> Path:
        """Path of a child's whole output, logs/<name>.log."""
        return self.folder / "logs" / f"{name}.log"

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl (metrics too). One write per line, so that concurrent writers do not mix."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": time.time(), "kind": kind, **fields}, ensure_ascii=False, default=str) + "\n"
        handle = os.open(self.folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def progress(self, step: str, done: int, total: int, note: str = "", **metrics: float) -> None:
        """Tell whoever watches, and the event file."""
        self.report(Progress(step, done, total, note, metrics))
        self.event("progress", step=step, done=done, total=total, note=note, **metrics)


EVENTS: Final = "events.jsonl"


def new_run(
    profile: Profile,
    *,
    report: Callable[[Progress], None] = silent,
    force: frozenset[str] = frozenset(),
    run_id: str | None = None,
) -> Run:
    """Start a run: make its folder and store the effective profile there."""
    run = Run(
        profile, run_id or f"{profile.name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}", report, force
    )
    write_atomic(run.folder / "profile.yaml", dump_profile(profile))
    return run


@dataclass(frozen=True, slots=True)
class Layout:
    """Each file and folder name under data/ and output/, defined only here."""

    profile: Profile

    @property
    def data(self) -> Path:
        return self.profile.paths.data

    @property
    def output(self) -> Path:
        return self.profile.paths.output

    @property
    def episodes(self) -> Path:
        return self.data / "episodes"

    @property
    def trajectories(self) -> Path:
        return self.data / "trajectories.parquet"

    @property
    def sft_rows(self) -> Path:
        return self.data / "agent_lora_sft" / "sft" / "train.jsonl"

    @property
    def rl_rows(self) -> Path:
        return self.data / "agent_lora_rl" / "train.jsonl"

    @property
    def sft(self) -> Path:
        """Folder of the vN-<timestamp> SFT runs of this model."""
        return self.output / f"{self.profile.model.short_name}-agent-lora-sft"

    @property
    def grpo(self) -> Path:
        return self.output / f"{self.profile.model.short_name}-agent-grpo"

    @property
    def evaluate(self) -> Path:
        return self.output / "evaluate" / self.profile.model.short_name

    @property
    def infer(self) -> Path:
        return self.output / "infer" / self.profile.model.short_name

    @property
    def prefect(self) -> Path:
        """PREFECT_HOME and results."""
        return self.output / ".prefect"

    @property
    def lock(self) -> Path:
        return self.output / ".lock"
