"""When a GRPO run goes wrong, from its figures alone: pure functions. The gap between trainer and sampler does not see it (FACTS: it stayed ≤ 0.0015).

A probe is a pass over the validation tasks (training/probe.py); a group is the rollouts of one prompt in one step, whose pass rate is one observation,
because rollouts of one prompt are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from training.statistics import sign_test

ALPHA: Final = 0.05
"""Chance of a false alarm of one probe, at most."""
SUSPICION: Final = 0.01
"""Of the training pass rate: it is looked at after each step, and costs a probe when it is wrong."""
GROUPS: Final = 8
"""Groups in the first and in the last window of steps, at least."""
ENOUGH: Final = 0.9
"""Share of its tasks that a probe must have scored to be compared with others."""
NO_ENTROPY: Final = 0.02
"""Share of its start below which the entropy counts as gone: then the rollouts of a prompt are all the same and teach nothing."""

Results = Mapping[str, bool | None]
"""Task → passed; None where it was not scored."""


def worse(before: Results, now: Results) -> float:
    """One-sided exact p-value of `now` being worse than `before`: sign test over the tasks that both scored. 1.0 where no more were lost than won."""
    pairs = [(before[task], now[task]) for task in before.keys() & now.keys()]
    lost = sum(was is True and is_now is False for was, is_now in pairs)
    won = sum(was is False and is_now is True for was, is_now in pairs)
    return sign_test(won, lost) / 2 if lost > won else 1.0


def collapsed(probes: Sequence[Mapping[str, Any]]) -> str:
    """Why training must stop after the last of `probes` (records of training/probe.py, by step), in words; empty when it need not.

    The best of several probes is also the luckiest, so with k earlier ones the limit is ALPHA / k: by the union bound a policy that stays as it is
    gives a false alarm with a chance of at most ALPHA a probe.
    """
    earlier = [probe for probe in probes[:-1] if usable(probe)]
    if not earlier:
        return ""
    best, now = max(earlier, key=rate), probes[-1]
    p = worse(best["results"], now["results"])
    if p * len(earlier) >= ALPHA:
        return ""
    return (
        f"validation fell from {best['passes']} of {best['scored']} after step {best['step']} to {now['passes']} of {now['scored']} "
        f"after step {now['step']} (p = {p:.2g})"
    )


def rate(probe: Mapping[str, Any]) -> float:
    """Pass rate of a probe over its scored tasks; below zero where nothing was scored."""
    return probe["passes"] / probe["scored"] if probe["scored"] else -1.0


def usable(probe: Mapping[str, Any]) -> bool:
    """Whether enough was scored: the rate of a few lucky tasks is no measure for the rest."""
    return bool(probe["scored"]) and probe["scored"] >= ENOUGH * probe["tasks"]


def falling(steps: Sequence[Sequence[float]]) -> str:
    """Whether the training pass rate fell, in words, from the pass rates of each step's groups; empty when it did not or nothing can be said."""
    first, last = window(steps), window(steps[::-1])
    if not first or first + last > len(steps):
        return ""
    start = [value for step in steps[:first] for value in step]
    end = [value for step in steps[-last:] for value in step]
    p = fall(start, end)
    if p >= SUSPICION:
        return ""
    return f"the pass rate of the rollouts fell from {mean(start):.0%} in the first {first} steps to {mean(end):.0%} in the last {last} (p = {p:.2g})"


def window(steps: Sequence[Sequence[float]]) -> int:
    """How many of the leading steps hold GROUPS groups; 0 when all of them do not."""
    groups = 0
    for count, step in enumerate(steps, start=1):
        groups += len(step)
        if groups >= GROUPS:
            return count
    return 0


def fall(start: Sequence[float], end: Sequence[float]) -> float:
    """One-sided p-value of a lower mean in `end`: the exact permutation test (Fisher 1935) on rates in percent, by counting subsets of each sum."""
    values = [round(100 * value) for value in (*start, *end)]
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in end)]
    for value in values:
        for size in range(len(end), 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + value] = ways[size].get(total + value, 0) + count
    seen = sum(values[len(start) :])
    subsets = ways[len(end)]
    return sum(count for total, count in subsets.items() if total <= seen) / sum(subsets.values())


def entropy_gone(first: float, now: float) -> str:
    """In words when the mean entropy of the sampled tokens is a tiny share of what it was; empty otherwise."""
    if first <= 0 or now >= NO_ENTROPY * first:
        return ""
    return f"the entropy of the rollouts fell from {first:.3g} to {now:.2g} nats a token: they are nearly all the same, and such groups teach nothing"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
