"""One table of where the time of a run went: step × phase, from what the steps measured of themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from configs.manifest import StepResult
from configs.run import Run

PHASES: Final = ("start-up", "generation", "tools", "grading", "training", "validation")
"""In this order; what a step spent besides (checks, saving, its process's end) is `other`."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What one step took."""

    step: str
    seconds: float
    phases: Mapping[str, float]
    peak_memory_gib: float | None = None
    reused: bool = False


def spent(step: str, seconds: float, summary: Mapping[str, Any], reused: bool = False) -> Spent:
    """Of a step, from its manifest."""
    return Spent(step, round(seconds, 1), summary.get("time", {}), summary.get("peak_memory_gib"), reused)


def of_run(run: Run, results: Sequence[StepResult]) -> tuple[list[str], list[list[str]]]:
    """The table of a pipeline's run up to now."""
    began = (run.folder / "profile.yaml").stat().st_mtime  # written as the run starts
    return table([spent(r.step, r.seconds, r.summary, r.reused) for r in results], time.time() - began)


def table(steps: Sequence[Spent], whole: float | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and rows. `whole` is the time of the run with all that lies between its steps; reused steps took none of it."""
    made = sum(step.seconds for step in steps if not step.reused)
    entries = [*steps]
    if whole is not None:
        entries.append(Spent("between the steps", max(0.0, whole - made), {}))
        whole = max(whole, made)
    else:
        whole = made
    phases = [phase for phase in PHASES if any(step.phases.get(phase) for step in steps)]
    header = ["step", *phases, *(["other"] if phases else []), "total", "share", "peak memory"]
    rows = []
    for step in entries:
        known = [minutes(step.phases[phase]) if step.phases.get(phase) else "–" for phase in phases]
        rest = [minutes(max(0.0, step.seconds - sum(step.phases.values()))) if step.phases else "–"] if phases else []
        share = "–" if step.reused or not whole else f"{step.seconds / whole:.0%}"
        memory = f"{step.peak_memory_gib:.1f} GiB" if step.peak_memory_gib else "–"
        name = f"{step.step} (reused)" if step.reused else step.step
        rows.append([name, *known, *rest, minutes(step.seconds), share, memory])
    sums = [sum(step.phases.get(phase, 0.0) for step in steps if not step.reused) for phase in phases]
    blank = ["–"] if phases else []
    in_all = ["in all", *map(minutes, sums), *blank, minutes(whole), "100%" if whole else "–", "–"]
    return header, [*rows, in_all] if rows else []


def minutes(seconds: float) -> str:
    """`3:07`."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
