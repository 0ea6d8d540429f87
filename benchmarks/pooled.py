"""The statistics of one recipe trained from several seeds and evaluated on the same tasks: pure functions of counts, nothing read or run.

A verdict belongs to a task and to a seed, and attempts that share either are not independent. So a pooled difference has three intervals: over
tasks (these trained adapters, other tasks), over seeds (these tasks, other trainings), and over both at once.

Sources: paired differences clustered by question: Miller, arXiv:2411.00640, sections 2.2 and 4.2; seeds as the unit: Colas et al., arXiv:1806.08295;
two-way clustering and its degrees of freedom: Cameron, Gelbach & Miller, J. Bus. Econ. Stat. 29 (2011) 238, and Cameron & Miller, J. Human Resources
50 (2015) 317, section V; distribution of t: Abramowitz & Stegun, 26.7.3 and 26.7.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import mean, stdev, variance

from training.statistics import Count, sign_test

Counts = Mapping[str, Count]
"""Task → scored attempts and passes of one policy of one seed."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95% t-interval; the bounds are None where the units are fewer than two or all alike, which says nothing of their spread."""

    value: float | None
    low: float | None
    high: float | None
    units: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds. `sd` is the sample's (n - 1), None for one seed."""

    mean: float
    sd: float | None
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Pooled:
    """The difference `a - b` of pass rates, from the seeds' tasks that both policies were scored on."""

    over_tasks: Mean
    """Unit: a task's difference, averaged over seeds."""
    over_seeds: Mean
    """Unit: a seed's difference, averaged over tasks."""
    over_both: Mean
    """Seeds and tasks both drawn anew; the widest of the three in general, and the one to quote."""
    won: int
    """Seeds where a is better."""
    tied: int
    lost: int
    seeds_p: float
    """Exact two-sided sign test over seeds; never under 2 / 2**seeds."""
    better: int
    """Tasks where a is better, averaged over seeds."""
    worse: int
    tasks_p: float
    """Exact two-sided sign test over tasks."""


def pooled(a: Sequence[Counts], b: Sequence[Counts]) -> Pooled:
    """Compare two policies, given one mapping a seed in the same order. Fractions are exact, so that a tie is a tie."""
    cells = [
        {t: _rate(x[t]) - _rate(y[t]) for t in sorted(x.keys() & y.keys()) if x[t].attempts and y[t].attempts}
        for x, y in zip(a, b, strict=True)
    ]
    seeds = [mean(seed.values()) for seed in cells if seed]
    names = sorted({task for seed in cells for task in seed})
    tasks = [mean([seed[task] for seed in cells if task in seed]) for task in names]
    won, lost = sum(d > 0 for d in seeds), sum(d < 0 for d in seeds)
    better, worse = sum(d > 0 for d in tasks), sum(d < 0 for d in tasks)
    return Pooled(
        over_tasks=mean_interval(tasks),
        over_seeds=mean_interval(seeds),
        over_both=_crossed(tasks, seeds, [d for seed in cells for d in seed.values()]),
        won=won,
        tied=len(seeds) - won - lost,
        lost=lost,
        seeds_p=sign_test(won, lost),
        better=better,
        worse=worse,
        tasks_p=sign_test(better, worse),
    )


def mean_interval(differences: Sequence[Fraction]) -> Mean:
    """The mean of independent differences between -1 and 1, with Student's 95% interval, cut to what is possible."""
    n = len(differences)
    return _mean(differences, float(variance(differences)) / n if n > 1 else 0.0, n - 1, n)


def spread(rates: Sequence[float]) -> Spread:
    """Mean, standard deviation, least and most of at least one seed's pass rates."""
    return Spread(math.fsum(rates) / len(rates), stdev(rates) if len(rates) > 1 else None, min(rates), max(rates))


def t_quantile(df: int) -> float:
    """Student's t that 97.5% lie below, by bisection."""
    if df < 1:
        raise ValueError("a t-interval needs at least one degree of freedom")
    low, high = 1.9, 12.8  # the normal's 1.96 and the 12.71 of one degree lie between
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, df) < 0.95 else (low, middle)
    return (low + high) / 2


def within(t: float, df: int) -> float:
    """The chance that Student's t with `df` degrees lies between -t and t."""
    angle = math.atan(t / math.sqrt(df))
    cosine = math.cos(angle)
    first = 1 + df % 2  # the factors are 2/3, 4/5, … for odd df and 1/2, 3/4, … for even df
    term = cosine if df % 2 else 1.0
    total = 0.0
    for k in range(first, df, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    return 2 / math.pi * (angle + math.sin(angle) * total) if df % 2 else math.sin(angle) * total


def _crossed(tasks: Sequence[Fraction], seeds: Sequence[Fraction], cells: Sequence[Fraction]) -> Mean:
    """Both ways at once: the variances add, and what both counted (a cell's own noise) comes off once; never narrower than either's standard error."""
    fewest = min(len(tasks), len(seeds))
    if fewest < 2:
        return Mean(float(mean(cells)) if cells else None, None, None, fewest)
    by_task, by_seed = float(variance(tasks)) / len(tasks), float(variance(seeds)) / len(seeds)
    both = by_task + by_seed - float(variance(cells)) / len(cells)
    return _mean(cells, max(both, by_task, by_seed), fewest - 1, fewest)


def _mean(values: Sequence[Fraction], squared_error: float, df: int, units: int) -> Mean:
    if not values:
        return Mean(None, None, None, 0)
    centre = float(mean(values))
    if squared_error == 0.0:
        return Mean(centre, None, None, units)
    half = t_quantile(df) * math.sqrt(squared_error)
    return Mean(centre, max(-1.0, centre - half), min(1.0, centre + half), units)


def _rate(count: Count) -> Fraction:
    return Fraction(count.passes, count.attempts)
