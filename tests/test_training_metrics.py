"""Reading ms-swift's log lines, as printed by 4.6.0."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import WorkFailed
from training.metrics import Watch, duration, parse, time_left

LINE = (
    "Train:  25%|██▌       | 1/4 [00:00<00:00,  3.05it/s]        {'loss': '7.98', 'grad_norm': '2.841', 'learning_rate': '0.0008536', 'token_acc': '0', "
    "'epoch': '0.03125', 'global_step/max_steps': '1/4', 'elapsed_time': '0s', 'remaining_time': '1m 3s', 'train_speed(s/it)': '0.33'}"
)
SUMMARY = (
    "{'train_runtime': '0.8129', 'train_samples_per_second': '9.841', 'train_steps_per_second': '4.921', 'train_loss': '7.776', 'epoch': '0.125', "
    "'global_step/max_steps': '4/4', 'elapsed_time': '1s', 'remaining_time': '0s', 'train_speed(s/it)': '0.2032'}"
)
GRPO = (
    "{'loss': 0.0, 'grad_norm': 0.0, 'reward': 0.25, 'reward_std': 0.5, 'kl': 0.0012, 'rollout_correction/kl': 0.0003, 'completions/mean_length': 24.0, "
    "'global_step/max_steps': '2/8', 'remaining_time': '1h 2m 3s', 'memory(GiB)': 61.2, 'train_speed(s/it)': 30.1}"
)


def step(number: int, loss: str = "'1.5'", grad: str = "'0.1'") -> str:
    return f"{{'loss': {loss}, 'grad_norm': {grad}, 'global_step/max_steps': '{number}/9', 'remaining_time': '9s'}}"


def test_a_logged_step_is_read_also_behind_a_progress_bar() -> None:
    logged = parse(LINE)
    assert logged is not None
    assert (logged.step, logged.max_steps, logged.seconds_left, logged.loss) == (1, 4, 63.0, 7.98)
    assert logged.values["learning_rate"] == 0.0008536


def test_numbers_without_quotes_are_read_too() -> None:
    logged = parse(GRPO)
    assert logged is not None
    assert (logged.step, logged.seconds_left, logged.values["reward"], logged.values["memory(GiB)"]) == (
        2,
        3723.0,
        0.25,
        61.2,
    )


def test_the_summary_at_the_end_is_no_further_step() -> None:
    watch = Watch("sft")
    watch.line(step(9))
    summary = watch.line(SUMMARY)
    assert summary is not None
    assert (summary.step, len(watch.steps)) == (0, 1)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{'a': 1",
        "{'model': 'x'}",
        "[INFO:swift] args: {'loss_scale': 'default'}",
        "{'loss': }",
        "{'loss': __import__('os')}",
    ],
)
def test_every_other_line_is_no_step(line: str) -> None:
    assert parse(line) is None


@given(st.text())
def test_no_line_makes_the_parser_raise(text: str) -> None:
    parse(text)
    parse("{'loss': " + text + "}")


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 10**6), st.booleans())
def test_every_finite_loss_is_read_back_quoted_or_not(loss: float, number: int, quoted: bool) -> None:
    logged = parse(
        f"{{'loss': {str(loss)!r}, 'global_step/max_steps': '{number}/{number}'}}"
        if quoted
        else f"{{'loss': {loss}, 'x': '1'}}"
    )
    assert logged is not None
    assert logged.loss == loss


@pytest.mark.parametrize("value", ["nan", "'nan'", "inf", "'-inf'", "-inf"])
def test_a_loss_that_is_no_number_stops_the_training_with_that_reason(value: str) -> None:
    watch = Watch("sft")
    watch.line(step(1))
    with pytest.raises(WorkFailed, match=r"loss is not a finite number at step 2 of 9; lower the learning rate"):
        watch.line(step(2, value))


def test_a_gradient_that_is_no_number_stops_it_too() -> None:
    with pytest.raises(WorkFailed, match="grad_norm"):
        Watch("sft").line(step(1, grad="nan"))


def test_two_trainings_that_should_be_one_are_found_by_a_step_logged_twice() -> None:
    watch = Watch("sft", processes=2)
    watch.line(step(1))
    with pytest.raises(WorkFailed, match="step 1 was logged twice"):
        watch.line(step(1, "'1.7'"))


def test_a_rank_that_sees_another_world_stops_the_run() -> None:
    line = "[INFO:swift] rank: 0, local_rank: 0, world_size: {}, local_world_size: 1"
    assert Watch("sft", processes=2).line(line.format(2)) is None
    assert (
        Watch("sft", processes=1).line("[INFO:swift] rank: -1, local_rank: -1, world_size: 1, local_world_size: 1")
        is None
    )
    with pytest.raises(WorkFailed, match="1 processes instead of 2"):
        Watch("sft", processes=2).line(line.format(1))


def test_rows_hold_only_finite_numbers() -> None:
    watch = Watch("grpo")
    watch.line("{'reward': 0.5, 'kl': nan, 'global_step/max_steps': '1/2'}")
    assert watch.rows() == [{"step": 1.0, "reward": 0.5}]
    assert all(math.isfinite(value) for row in watch.rows() for value in row.values())


def test_durations_are_seconds() -> None:
    assert [duration(text) for text in ("3s", "1m 3s", "1h 2m 3s", "2d 0h 0m 1s", "soon")] == [
        3.0,
        63.0,
        3723.0,
        172801.0,
        None,
    ]
    assert [time_left(seconds) for seconds in (None, 12.0, 300.0)] == ["", "about 12 s left", "about 5 min left"]
