"""A probe of a GRPO training, which is one pass over its validation tasks: its record, the best of several, and how the trainer tells of it. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agents.trajectory import Trajectory, Verdict
from training.collapse import rate, usable

PROBES: Final = "probes.jsonl"
"""Beside the checkpoints, one probe a line; see `record`. Their trajectories are in the rollouts' folder, in a file of the same name."""
VALIDATION_VARIABLE: Final = "AGENTEXECUTOR_VALIDATION"
"""Path of the validation prompts, for the plugin inside the trainer; without it there are no probes."""

_SAID: Final = "agentexecutor event "


def notice(kind: str, note: str, **fields: Any) -> str:
    """The line that tells the supervisor of the training."""
    return _SAID + json.dumps({"kind": kind, "note": note, **fields})


def heard(line: str) -> dict[str, Any] | None:
    """The notice in a line of output; a progress bar may stand before and after it."""
    _, found, text = line.partition(_SAID)
    if not found:
        return None
    try:
        said, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "kind" in said else None


def record(step: int, trajectories: Sequence[Trajectory], seconds: float, temperature: float) -> dict[str, Any]:
    """A probe as a line of probes.jsonl. `families`: name → [passes, scored]; `results`: task → passed, or null where it was not scored."""
    verdicts = {
        t.task_id: None if t.outcome.verdict is Verdict.NOT_SCORED else t.outcome.verdict is Verdict.PASSED
        for t in trajectories
    }
    families: dict[str, list[int]] = {}
    for trajectory in sorted(trajectories, key=lambda t: t.family):
        passed = verdicts[trajectory.task_id]
        count = families.setdefault(trajectory.family, [0, 0])
        count[0] += passed is True
        count[1] += passed is not None
    scored = [passed for passed in verdicts.values() if passed is not None]
    return {
        "step": step,
        "tasks": len(verdicts),
        "scored": len(scored),
        "passes": sum(scored),
        "not_scored": len(verdicts) - len(scored),
        **({"pass_rate": round(sum(scored) / len(scored), 6)} if scored else {}),
        "families": families,
        "stop_reasons": dict(sorted(Counter(str(t.stop_reason) for t in trajectories).items())),
        "seconds": round(seconds, 2),
        "temperature": temperature,
        "results": verdicts,
    }


def best(probes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The probe with the highest pass rate; None where no probe scored enough.

    Of equal ones the later: its training was rewarded for longer on other tasks, which is evidence too. Step 0 keeps a tie, because nothing has beaten it.
    """
    return max(filter(usable, probes), key=lambda p: (rate(p), p["step"] == 0, p["step"]), default=None)


def share(tasks: int, rank: int, ranks: int) -> list[int]:
    """Places of the tasks of one rank. Each rank gets equally many, so that all call the engine equally often; those ≥ `tasks` only fill up."""
    return [rank + ranks * turn for turn in range(-(-tasks // ranks))]
