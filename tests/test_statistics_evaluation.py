"""The statistics of an evaluation against values worked out by hand or by scipy 1.16 (constants here: scipy is no dependency)."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.statistics import Count, effective_trials, paired, pass_at_k, pass_rate, sign_test, wilson

counts = st.lists(
    st.integers(1, 6).flatmap(lambda n: st.integers(0, n).map(lambda k: Count(k, n))), min_size=1, max_size=40
)


def known(value: float | None) -> float:
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("passes", "n", "low", "high"),
    [
        (7, 20, 0.1811918241010821, 0.5671457233147637),
        (0, 10, 0.0, 0.27753279986288926),
        (41, 48, 0.7283282347525372, 0.9275175067339628),
    ],
)
def test_wilsons_interval_equals_scipys(passes: int, n: int, low: float, high: float) -> None:
    assert wilson(passes / n, n) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(3, 12, 0.03515625), (2, 10, 0.03857421875), (5, 5, 1.0), (0, 0, 1.0), (0, 6, 0.03125)]
)
def test_the_exact_test_equals_scipys_binomial_test(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p, abs=1e-12)
    assert sign_test(better, worse) == sign_test(worse, better)


def test_one_attempt_a_task_gives_wilsons_interval_itself() -> None:
    rate = pass_rate([Count(1, 1)] * 7 + [Count(0, 1)] * 13)
    assert (rate.low, rate.high) == pytest.approx((0.1811918241010821, 0.5671457233147637), abs=1e-12)


def test_attempts_that_always_agree_count_as_one_each() -> None:
    """Ten tasks tried eight times with the same verdict each time hold ten trials, not eighty."""
    tasks = [Count(8, 8)] * 4 + [Count(0, 8)] * 6
    assert effective_trials(tasks) == 10
    once = pass_rate([Count(1, 1)] * 4 + [Count(0, 1)] * 6)
    assert (pass_rate(tasks).low, pass_rate(tasks).attempts) == (once.low, 80)


def test_the_effective_number_of_trials_is_the_one_worked_out_by_hand() -> None:
    """p = 6/12; residuals 1, 1, 0, -1, 0, -1 over two attempts each: V = 6/5 · 4 / 144 = 1/30, p(1-p)/V = 7.5."""
    tasks = [Count(2, 2), Count(2, 2), Count(1, 2), Count(0, 2), Count(1, 2), Count(0, 2)]
    assert effective_trials(tasks) == pytest.approx(7.5)


def test_newcombes_interval_of_a_paired_difference_is_the_one_worked_out_by_hand() -> None:
    """Table 36, 12, 2, 0 of 50 pairs: 48/50 against 38/50; φ = (36·0 - 12·2)/√(48·2·38·12) from the table itself."""
    a = {f"t{i}": Count(int(i < 48), 1) for i in range(50)}
    b = {f"t{i}": Count(int(i < 36 or i >= 48), 1) for i in range(50)}
    found = paired(a, b)
    phi = (36 * 0 - 12 * 2) / math.sqrt(48 * 2 * 38 * 12)
    (l1, u1), (l2, u2) = wilson(0.96, 50), wilson(0.76, 50)
    low = 0.2 - math.sqrt((0.96 - l1) ** 2 - 2 * phi * (0.96 - l1) * (u2 - 0.76) + (u2 - 0.76) ** 2)
    high = 0.2 + math.sqrt((u1 - 0.96) ** 2 - 2 * phi * (u1 - 0.96) * (0.76 - l2) + (0.76 - l2) ** 2)
    assert (found.difference, found.low, found.high) == pytest.approx((0.2, low, high), abs=1e-12)
    assert (found.better, found.worse) == (12, 2)
    assert found.p_value == pytest.approx(2 * (1 + 14 + 91) / 2**14)


def test_a_task_that_one_policy_was_not_scored_on_leaves_the_comparison() -> None:
    found = paired(
        {"x": Count(1, 1), "y": Count(0, 0), "z": Count(1, 1)}, {"x": Count(0, 1), "y": Count(1, 1), "w": Count(1, 1)}
    )
    assert (found.tasks, found.difference, found.better, found.worse) == (1, 1.0, 1, 0)
    assert paired({"x": Count(0, 0)}, {"x": Count(1, 1)}).difference is None


def test_pass_at_k_is_undefined_where_fewer_attempts_were_scored() -> None:
    """BEHAVIOURS 30."""
    none = pass_at_k([Count(1, 3), Count(0, 2)], 4)
    assert (none.value, none.tasks, none.undefined) == (None, 0, 2)
    some = pass_at_k([Count(1, 4), Count(2, 3)], 4)
    assert (some.value, some.tasks, some.undefined) == (1.0, 1, 1)


def test_pass_at_k_is_the_unbiased_estimate_worked_out_by_hand() -> None:
    """One of four passes, k = 2: 1 - C(3,2)/C(4,2) = 1/2; two of five, k = 3: 1 - C(3,3)/C(5,3) = 9/10."""
    assert pass_at_k([Count(1, 4)], 2).value == pytest.approx(0.5)
    assert pass_at_k([Count(2, 5)], 3).value == pytest.approx(0.9)


def test_nothing_scored_has_no_rate_instead_of_a_zero() -> None:
    assert pass_rate([Count(0, 0)]).rate is None
    assert pass_rate([]).low is None


@given(counts)
def test_an_interval_holds_its_rate_and_stays_between_0_and_1(tasks: list[Count]) -> None:
    rate = pass_rate(tasks)
    assert 0 <= known(rate.low) <= known(rate.rate) <= known(rate.high) <= 1
    assert len(tasks) <= effective_trials(tasks) <= sum(t.attempts for t in tasks)


@given(counts, st.randoms(use_true_random=False))
def test_a_comparison_turned_round_is_the_same_with_the_sign_turned(tasks: list[Count], rng: random.Random) -> None:
    other = [Count(rng.randint(0, t.attempts), t.attempts) for t in tasks]
    a, b = {str(i): t for i, t in enumerate(tasks)}, {str(i): t for i, t in enumerate(other)}
    one, two = paired(a, b), paired(b, a)
    assert (one.difference, one.low, one.p_value) == pytest.approx(
        (-known(two.difference), -known(two.high), two.p_value)
    )
    assert -1 <= known(one.low) <= known(one.difference) + 1e-12 <= known(one.high) + 2e-12 <= 1 + 2e-12


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 7))
def test_pass_at_k_never_falls_with_k(n: int, c: int, k: int) -> None:
    task = [Count(min(c, n), n)]
    now, more = pass_at_k(task, k).value, pass_at_k(task, k + 1).value
    assert now is None or more is None or now <= more + 1e-12


def test_the_paired_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """1,000 simulated evaluations of 96 tasks with difficulty shared by both policies: 95% within what 1,000 draws can tell."""
    rng = random.Random(3)
    covered = 0
    for _ in range(1000):
        a, b = {}, {}
        for task in range(96):
            hard = rng.random()
            base, tuned = 0.3 + 0.4 * (hard > 0.5), 0.45 + 0.4 * (hard > 0.5)
            a[str(task)], b[str(task)] = Count(int(rng.random() < tuned), 1), Count(int(rng.random() < base), 1)
        found = paired(a, b)
        covered += known(found.low) <= 0.15 <= known(found.high)
    assert 925 <= covered <= 985
