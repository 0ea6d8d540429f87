"""The statistics of an evaluation: pure functions of counts. Attempts at one task are not independent, so the task is the unit everywhere.

Sources: Wilson, JASA 22 (1927) 209; effective sample size of clustered proportions: Korn & Graubard, Survey Methodology 24 (1998) 193, with
Wilson's interval as compared by Dean & Pagano, J. Surv. Stat. Methodol. 3 (2015) 484; difference of paired proportions: Newcombe, Stat. Med.
17 (1998) 2635, method 8; exact test: McNemar, Psychometrika 12 (1947) 153, as a sign test; pass@k: Chen et al., arXiv:2107.03374, eq. 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

Z95: Final = NormalDist().inv_cdf(0.975)
"""1.95996…: two-sided 95%."""


@dataclass(frozen=True, slots=True)
class Count:
    """Scored attempts at one task and how many passed; not-scored attempts are in neither."""

    passes: int
    attempts: int

    def __post_init__(self) -> None:
        if not 0 <= self.passes <= self.attempts:
            raise ValueError(f"{self.passes} passes of {self.attempts} attempts is impossible")


@dataclass(frozen=True, slots=True)
class Rate:
    """A pass rate with its 95% interval. All three are None where nothing was scored."""

    passes: int
    attempts: int
    rate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Paired:
    """The difference `a - b` over the tasks that both policies have scored attempts of. None where there is no such task."""

    tasks: int
    difference: float | None
    low: float | None
    high: float | None
    better: int
    """Tasks where a's pass rate is higher."""
    worse: int
    p_value: float
    """Exact and two-sided; 1.0 where no task differs."""


@dataclass(frozen=True, slots=True)
class PassAtK:
    """Mean over the tasks with at least `k` scored attempts; None where no task has that many."""

    k: int
    value: float | None
    tasks: int
    undefined: int
    """Tasks with fewer than `k` scored attempts, for which pass@k is undefined; they are not in `value`."""


def wilson(rate: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion `rate` seen in `n` (effective, so not necessarily whole) trials."""
    if n <= 0:
        raise ValueError("an interval needs at least one trial")
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 and at 1 the bound is the rate itself; rounding must not put it beside.
    return min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))


def pass_rate(tasks: Sequence[Count]) -> Rate:
    """Passes over scored attempts, with Wilson's interval on the effective number of trials."""
    passes, attempts = sum(t.passes for t in tasks), sum(t.attempts for t in tasks)
    return Rate(passes, attempts, *_bounds(tasks)) if attempts else Rate(0, 0, None, None, None)


def effective_trials(tasks: Sequence[Count]) -> float:
    """Independent trials that would give the variance seen between tasks; with one attempt a task, simply their number.

    The variance of the ratio of passes to attempts is `m/(m-1) Σ(xᵢ - p nᵢ)² / n²`. The result stays between the number of tasks (all attempts
    at a task agree) and the number of attempts (they are independent); a rate of 0 or 1 shows no variance and counts the tasks.
    """
    scored = [t for t in tasks if t.attempts]
    m, n = len(scored), sum(t.attempts for t in scored)
    rate = sum(t.passes for t in scored) / n
    if m == n:
        return float(n)
    spread = sum(e * e for e in _residuals(scored, rate))
    if m < 2 or rate in (0.0, 1.0) or spread == 0.0:
        return float(n) if 0.0 < rate < 1.0 and m > 1 else float(m)
    variance = m / (m - 1) * spread / (n * n)
    return min(float(n), max(float(m), rate * (1 - rate) / variance))


def paired(a: Mapping[str, Count], b: Mapping[str, Count]) -> Paired:
    """Compare two policies on the tasks (by name) that both were scored on.

    The interval joins the two Wilson intervals by squares and takes off what the correlation between tasks explains (Newcombe's method 8; with
    one attempt a task it is exactly that). The p-value is the sign test over tasks; with one attempt a task that is McNemar's exact test.
    """
    common = sorted(t for t in a.keys() & b.keys() if a[t].attempts and b[t].attempts)
    if not common:
        return Paired(0, None, None, None, 0, 0, 1.0)
    ours, theirs = [a[t] for t in common], [b[t] for t in common]
    (p1, low1, high1), (p2, low2, high2) = _bounds(ours), _bounds(theirs)
    r = correlation(_residuals(ours, p1), _residuals(theirs, p2))
    difference = p1 - p2
    down, up = _join(p1 - low1, high2 - p2, r), _join(high1 - p1, p2 - low2, r)
    signs = [x.passes * y.attempts - y.passes * x.attempts for x, y in zip(ours, theirs, strict=True)]
    better, worse = sum(s > 0 for s in signs), sum(s < 0 for s in signs)
    low, high = max(-1.0, difference - down), min(1.0, difference + up)
    return Paired(len(common), difference, low, high, better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value of `better` against `worse` under a fair coin: `min(1, 2 P(X ≤ min))`, X ~ Binomial(better + worse, ½)."""
    n, k = better + worse, min(better, worse)
    tail: int = sum(math.comb(n, i) for i in range(k + 1))
    return float(min(1.0, 2 * tail / 2**n))


def pass_at_k(tasks: Sequence[Count], k: int) -> PassAtK:
    """The chance that at least one of `k` attempts passes: per task `1 - C(n-c, k) / C(n, k)`, and the mean over tasks."""
    if k < 1:
        raise ValueError("k is at least 1")
    values = [1.0 - math.comb(t.attempts - t.passes, k) / math.comb(t.attempts, k) for t in tasks if t.attempts >= k]
    return PassAtK(k, sum(values) / len(values) if values else None, len(values), len(tasks) - len(values))


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's correlation of values that sum to zero each; 0 where one of them does not vary."""
    scale = math.sqrt(sum(x * x for x in xs) * sum(y * y for y in ys))
    return max(-1.0, min(1.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / scale)) if scale else 0.0


def _bounds(tasks: Sequence[Count]) -> tuple[float, float, float]:
    """Pass rate, low and high of tasks with at least one scored attempt among them."""
    rate = sum(t.passes for t in tasks) / sum(t.attempts for t in tasks)
    return rate, *wilson(rate, effective_trials(tasks))


def _residuals(tasks: Sequence[Count], rate: float) -> list[float]:
    return [t.passes - rate * t.attempts for t in tasks]


def _join(one: float, two: float, r: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * r * one * two + two * two))
