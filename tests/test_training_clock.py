"""Where the time of a training goes: overlapping rollouts share each instant, and no second is lost or counted twice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.clock import KEY, Clock, Steps, line, parse


class Time:
    """A clock's hand that the test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_what_runs_at_once_shares_the_instant_and_waiting_for_the_model_is_generation() -> None:
    now = Time()
    clock = Clock(now)
    with clock.doing("tools"):
        now.at += 2
    clock.idle("generation")
    now.at += 5
    with clock.doing("tools"), clock.doing("tools"), clock.doing("grading"):
        now.at += 3
    clock.idle("")
    now.at += 50  # the trainer's own time
    assert clock.take() == {"tools": pytest.approx(4), "generation": pytest.approx(5), "grading": pytest.approx(1)}
    assert clock.take() == {}


def test_rollouts_of_a_validation_count_for_it_alone() -> None:
    now = Time()
    clock = Clock(now)
    with clock.all_as("validation"):
        with clock.doing("tools"):
            now.at += 1
        clock.idle("generation")
        now.at += 4
        clock.idle("")
    assert clock.take() == {"validation": pytest.approx(5)}


@given(
    st.lists(
        st.tuples(st.sampled_from(("tools", "grading", "idle")), st.floats(0, 100), st.floats(0, 100)), max_size=20
    )
)
def test_every_second_of_a_round_is_in_exactly_one_phase(done: list[tuple[str, float, float]]) -> None:
    now = Time()
    clock = Clock(now)
    clock.idle("generation")
    for phase, alone, more in done:
        if phase == "idle":
            now.at += alone
            continue
        with clock.doing(phase):
            now.at += alone
            with clock.doing("grading"):
                now.at += more
    passed = now.at - 100.0
    assert sum(clock.take().values()) == pytest.approx(passed)


def test_the_line_is_found_behind_a_progress_bar_and_no_other_line_is_taken_for_it() -> None:
    seconds = {"generation": 12.25, "tools": 0.5}
    assert parse(f"Train:  25%|██▌       | 1/4 {line(seconds)}") == seconds
    assert parse("{'loss': '0.5', 'global_step/max_steps': '1/4'}") == {}


def test_a_step_is_its_rollouts_and_the_rest_is_training_and_before_the_first_lies_the_start_up() -> None:
    now = Time()
    steps = Steps(now)
    now.at += 60
    steps.heard(line({"generation": 15.0, "tools": 1.0, "grading": 2.0}))
    now.at += 10
    assert steps.step(30.0) == {
        KEY + "generation": 15.0,
        KEY + "tools": 1.0,
        KEY + "grading": 2.0,
        KEY + "training": 12.0,
    }
    now.at += 25
    steps.heard(line({"validation": 5.0}))
    steps.heard(line({"generation": 14.0}))
    assert steps.step(27.5) == {KEY + "validation": 5.0, KEY + "generation": 14.0, KEY + "training": 6.0}
    steps.heard(line({"validation": 4.0}))  # after the last step
    assert steps.end() == {
        "start-up": 40.0,
        "generation": 29.0,
        "tools": 1.0,
        "grading": 2.0,
        "training": 18.0,
        "validation": 9.0,
    }
    assert json.loads(json.dumps(steps.end())) == steps.end()
