"""Reads ms-swift's log lines (4.6.0): one dict a logged step, and tqdm's progress bar. The only place that knows their form."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from configs.errors import WorkFailed

_DICT: Final = re.compile(r"\{'[^']+': .*\}")
_BARE: Final = re.compile(r"(?<=: )(-?)(nan|inf)(?=[,}\]])")
"""`nan` and `inf` are printed without quotes, and are no Python literals."""
_UNITS: Final = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_RANKS: Final = re.compile(r"rank: (-?\d+), local_rank: -?\d+, world_size: (\d+)")

STEP: Final = "global_step/max_steps"


@dataclass(frozen=True, slots=True)
class Logged:
    """One logged step. `step` and `max_steps` are 0 in the summary at the end; `values` are the numbers, by ms-swift's own names."""

    step: int
    max_steps: int
    seconds_left: float | None
    values: dict[str, float]

    @property
    def loss(self) -> float | None:
        return self.values.get("loss")


def parse(line: str) -> Logged | None:
    """The logged step in a line of output; None for every other line. Never raises."""
    match = _DICT.search(line)
    if match is None or "'" not in line:
        return None
    try:
        raw = ast.literal_eval(_BARE.sub(r"'\1\2'", match.group()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return from_record(raw) if isinstance(raw, dict) else None


def from_record(raw: Mapping[str, Any]) -> Logged | None:
    """The logged step in a dict of ms-swift's, as in its log lines and in its logging.jsonl; None when it is another one."""
    values = {str(key): number for key, value in raw.items() if (number := _number(value)) is not None}
    if not ({"loss", "reward", "train_runtime", "train_loss"} & values.keys()):
        return None
    # The summary at the end repeats the last step.
    done, _, total = ("", "", "") if "train_runtime" in values else str(raw.get(STEP, "")).partition("/")
    left = raw.get("remaining_time")
    return Logged(
        step=int(done) if done.isdigit() else 0,
        max_steps=int(total) if total.isdigit() else 0,
        seconds_left=duration(str(left)) if left is not None else None,
        values=values,
    )


def duration(text: str) -> float | None:
    """Seconds of `1h 2m 3s`; None for another text."""
    parts = _DURATION.findall(text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else None


def time_left(seconds: float | None) -> str:
    """`about 3 min left`, for people; empty while unknown."""
    if seconds is None:
        return ""
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def world_size(line: str) -> int | None:
    """The number of processes that a rank says it is one of; None for every other line."""
    match = _RANKS.search(line)
    return int(match.group(2)) if match else None


@dataclass
class Watch:
    """Follows a training's lines: keeps its steps, and raises `WorkFailed` on what makes going on pointless."""

    name: str
    processes: int = 1
    """Processes that must train together."""
    steps: list[Logged] = field(default_factory=list)

    def line(self, line: str) -> Logged | None:
        """Take a line; the newly logged step when it holds one."""
        world = world_size(line)
        if world is not None and max(world, 1) != self.processes:
            raise WorkFailed(
                f"{self.name}: a rank sees {max(world, 1)} processes instead of {self.processes}; "
                "several independent trainings were about to write into one folder."
            )
        logged = parse(line)
        if logged is None:
            return None
        broken = sorted(key for key in ("loss", "grad_norm") if not math.isfinite(logged.values.get(key, 0.0)))
        if broken:
            raise WorkFailed(
                f"{self.name}: {' and '.join(broken)} is not a finite number at step {logged.step} of {logged.max_steps}; "
                "lower the learning rate. Checkpoints saved before are kept."
            )
        if logged.step:
            if self.steps and logged.step <= self.steps[-1].step:
                raise WorkFailed(
                    f"{self.name}: step {logged.step} was logged twice: more than one process trains and logs on its own."
                )
            self.steps.append(logged)
        return logged

    def rows(self) -> list[dict[str, float]]:
        """One row a step for metrics.jsonl."""
        return [row(logged) for logged in self.steps]


def row(logged: Logged) -> dict[str, float]:
    """A step as a row of metrics.jsonl: finite numbers only."""
    return {"step": float(logged.step), **{key: value for key, value in logged.values.items() if math.isfinite(value)}}


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value.removesuffix("GiB"))
        except ValueError:
            return None
    return None
