"""Where the time of a training goes, by the clock on the wall.

Rollouts overlap, so each instant is shared equally among what runs in it. When every rollout waits for the model, that is generation. The trainer
prints what a round of rollouts took, its supervisor reads that line, and what a step took beyond it is training.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

KEY: Final = "agent/seconds/"
"""Prefix of a phase's seconds in metrics.jsonl."""
GENERATION: Final = "generation"
TRAINING: Final = "training"
START: Final = "start-up"
PHASE_OF: Final = {
    "generate": GENERATION,
    "create": "tools",
    "setup": "tools",
    "tools": "tools",
    "export": "grading",
    "grade": "grading",
}
"""What an episode does, by its name in Trajectory.timings → the phase that it counts for."""

_LINE: Final = re.compile(r"agentexecutor seconds (\{[^}]*\})")


class Clock:
    """Seconds by phase. Not for several threads at once."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._at = now()
        self._active: Counter[str] = Counter()
        self._idle = ""
        self._instead = ""

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Something of `phase` runs inside."""
        self._pass()
        self._active[phase] += 1
        try:
            yield
        finally:
            self._pass()
            self._active[phase] -= 1

    def idle(self, phase: str) -> None:
        """What it means from here on that nothing runs; empty: it is no one's time."""
        self._pass()
        self._idle = phase

    @contextmanager
    def all_as(self, phase: str) -> Iterator[None]:
        """Everything inside counts for this one phase: rollouts of a validation are not those of a step."""
        self._pass()
        self._instead = phase
        try:
            yield
        finally:
            self._pass()
            self._instead = ""

    def take(self) -> dict[str, float]:
        """The seconds since the last call, and a fresh start."""
        self._pass()
        taken, self.seconds = self.seconds, {}
        return taken

    def _pass(self) -> None:
        now = self._now()
        passed, self._at = now - self._at, now
        running = self._active.total()
        shares = {name: count / running for name, count in self._active.items() if count} or {self._idle: 1.0}
        for name, share in shares.items():
            if name:
                phase = self._instead or name
                self.seconds[phase] = self.seconds.get(phase, 0.0) + passed * share


def shared(seconds: float, episodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The `seconds` that episodes took together on the clock, by phase: in proportion to their own timings, as they ran at once."""
    sums: dict[str, float] = dict.fromkeys(PHASE_OF.values(), 0.0)
    for timings in episodes:
        for name, phase in PHASE_OF.items():
            sums[phase] += timings.get(name, 0.0)
    whole = sum(sums.values())
    return {phase: round(seconds * own / whole, 1) for phase, own in sums.items()} if whole else {}


def line(seconds: dict[str, float]) -> str:
    """What the trainer prints."""
    return f"agentexecutor seconds {json.dumps({name: round(value, 3) for name, value in seconds.items()})}"


def parse(text: str) -> dict[str, float]:
    """The seconds in a line of output, empty for every other line."""
    found = _LINE.search(text)
    return {str(name): float(value) for name, value in json.loads(found.group(1)).items()} if found else {}


class Steps:
    """The supervisor's side: a training's lines and when they came → the seconds of each step, and of all of them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.total: dict[str, float] = {}
        self._now = now
        self._at = now()
        self._first = True
        self._waiting: dict[str, float] = {}

    def heard(self, text: str) -> None:
        """Take a line that is no step's."""
        for phase, seconds in parse(text).items():
            self._waiting[phase] = self._waiting.get(phase, 0.0) + seconds

    def step(self, since_start: float | None) -> dict[str, float]:
        """A step was logged: its seconds as figures for metrics.jsonl.

        `since_start` is the trainer's own time of its first step (None where it says none): what passed before is the start-up.
        """
        now = self._now()
        passed, self._at = now - self._at, now
        if self._first:
            self._first = False
            took = min(max(since_start or 0.0, sum(self._waiting.values())), passed)
            self.total[START] = passed - took
            passed = took
        phases = self._waiting | {TRAINING: max(0.0, passed - sum(self._waiting.values()))}
        self._waiting = {}
        for phase, seconds in phases.items():
            self.total[phase] = self.total.get(phase, 0.0) + seconds
        return {KEY + phase: round(seconds, 3) for phase, seconds in phases.items()}

    def end(self) -> dict[str, float]:
        """Rounds after the last step count too. All seconds of the training, rounded."""
        for phase, seconds in self._waiting.items():
            self.total[phase] = self.total.get(phase, 0.0) + seconds
        self._waiting = {}
        return {phase: round(seconds, 1) for phase, seconds in self.total.items()}
