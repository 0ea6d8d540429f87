"""The GRPO plugin, and a policy whose validation collapses after step 2: the tasks are really played, and the verdicts are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agents.trajectory import Outcome, Trajectory, Verdict
from training import guard
from training.plugins import cpu_plugin, grpo_plugin  # noqa: F401

LOST = {0: 1, 1: 0}
"""Step → tasks that fail; all of them at a later one."""

real = guard.record


def given(step: int, trajectories: Sequence[Trajectory], *more: Any) -> dict[str, Any]:
    lost = LOST.get(step, len(trajectories))
    for place, trajectory in enumerate(trajectories):
        trajectory.outcome = Outcome(verdict=Verdict.FAILED if place < lost else Verdict.PASSED)
    return real(step, trajectories, *more)


guard.record = given
