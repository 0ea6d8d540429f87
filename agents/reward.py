"""The one reward rule, for collection, evaluation and GRPO."""

from __future__ import annotations

from agents.trajectory import Outcome


def reward(
    outcome: Outcome,
    well_formed: bool,
    format_reward: float = 0.0,
    *,
    finished: bool = True,
    unfinished_reward: float = 1.0,
) -> float | None:
    """1 for a passed episode; `format_reward` for a failed one whose every tool call could be run; 0 otherwise; None when not scored.

    A passed episode that a limit ended, instead of the policy itself (`finished`), gets `unfinished_reward`. `format_reward` is below 1, so that form
    never beats the verdict. None enters no mean, no advantage and no denominator.
    """
    verdict = outcome.reward
    if verdict == 1.0:
        return 1.0 if finished else unfinished_reward
    return verdict if verdict is None or not well_formed else format_reward
