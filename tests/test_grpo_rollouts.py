"""The sandbox side of GRPO rollouts, on the mock backend with its faults; training/rollout.py. No ms-swift needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agents.parsing import render
from agents.prompts import initial_messages
from agents.reward import reward
from agents.task import Limits, Task, ToolCall, Verifier
from agents.trajectory import StopReason, Trajectory, Turn, Verdict
from configs.errors import UserError
from configs.load import load_profile
from sandboxes import SandboxError, SandboxGone, SandboxUnavailable
from sandboxes.mock import NEVER, Fault, MockBackend
from training.clock import parse
from training.rollout import Rollouts

TASK = Task(
    id="t",
    family="file",
    prompt="Write the word blue into colour.txt.",
    verifier=Verifier(command="test -f colour.txt"),
)
CALL = ToolCall(name="write_file", arguments={"path": "colour.txt", "content": "blue\n"})
WRITE = render([CALL], "hermes")
DONE = "Done."


def rollouts(backend: MockBackend, **flags: Any) -> Rollouts:
    return Rollouts(load_profile("smoke", flags=flags, environ={}), "test-rank0", backend)


def turn(finish: str = "stop") -> Turn:
    return Turn(token_ids=[5, 6, 2], logprobs=[-0.1, -0.2, -0.3], loss_mask=[1, 1, 1], finish_reason=finish)


async def play(
    room: Rollouts, texts: list[str], task: Task = TASK, name: str = "r0", finish: str = "stop", last: int = 99
) -> Trajectory:
    """Start one rollout, give it the turns until it stops, and finish it."""
    await room.start({name: task})
    for number, text in enumerate(texts, start=1):
        step = await room.turn(name, text, turn(finish), last=number >= last)
        if step.stop is not None:
            return await room.finish(name, step.stop)
    raise AssertionError("the rollout did not stop")


async def test_a_rollout_that_does_the_task_passes_in_a_fresh_sandbox() -> None:
    backend = MockBackend()
    room = rollouts(backend)
    record = await play(room, [WRITE, DONE])
    assert (record.outcome.verdict, record.stop_reason, record.extra["well_formed"]) == (
        Verdict.PASSED,
        StopReason.FINISHED,
        True,
    )
    assert [m.role for m in record.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert record.messages[:2] == initial_messages(TASK)
    assert record.messages[3].content == "exit_code: 0"
    assert room.pool.created == room.pool.killed == 2, "one sandbox for the agent, one for grading"


async def test_a_rollout_keeps_the_sampled_ids_masks_and_log_probabilities_unchanged() -> None:
    record = await play(rollouts(MockBackend()), [WRITE, DONE])
    assert [(t.token_ids, t.logprobs, t.loss_mask) for t in record.turns] == [
        ([5, 6, 2], [-0.1, -0.2, -0.3], [1, 1, 1])
    ] * 2


@pytest.mark.parametrize(
    ("texts", "finish", "last", "stop"),
    [
        ([WRITE], "length", 99, StopReason.MAX_TOKENS),
        ([WRITE, WRITE], "stop", 2, StopReason.MAX_TURNS),
        (["<tool_call>\nnot json\n</tool_call>"] * 3, "stop", 99, StopReason.PARSE_ERROR),
        ([DONE], "stop", 99, StopReason.FINISHED),
    ],
)
async def test_every_way_to_end_is_graded_and_leaves_no_sandbox(
    texts: list[str], finish: str, last: int, stop: StopReason
) -> None:
    backend = MockBackend()
    room = rollouts(backend)
    record = await play(room, texts, finish=finish, last=last)
    assert record.stop_reason is stop
    assert record.outcome.verdict is (Verdict.PASSED if stop is StopReason.MAX_TURNS else Verdict.FAILED)
    assert not backend.live
    assert not room.live


async def test_the_calls_of_the_last_turn_still_run_before_grading() -> None:
    record = await play(rollouts(MockBackend()), [WRITE], last=1)
    assert record.outcome.verdict is Verdict.PASSED


async def test_a_wrong_call_is_shown_precisely_and_nothing_is_run() -> None:
    room = rollouts(MockBackend())
    await room.start({"r": TASK})
    step = await room.turn("r", render([CALL, ToolCall(name="nope")], "hermes"), turn(), last=False)
    assert step.stop is None
    assert "there is no tool 'nope'" in step.messages[1].content
    assert "not run" in step.messages[0].content
    record = await room.finish("r", StopReason.FINISHED)
    assert (record.outcome.verdict, record.extra["well_formed"]) == (Verdict.FAILED, False)


async def test_doing_nothing_is_not_good_form() -> None:
    record = await play(rollouts(MockBackend()), [DONE])
    assert reward(record.outcome, record.extra["well_formed"], 0.1) == 0.0


async def test_a_sandbox_that_cannot_be_created_once_is_simply_created_again() -> None:
    record = await play(rollouts(MockBackend([Fault("create", 1, SandboxError("busy"))])), [WRITE, DONE])
    assert (record.outcome.verdict, record.tries) == (Verdict.PASSED, 2)


@pytest.mark.parametrize(
    "fault", [Fault("write_file", 1, SandboxGone("died")), Fault("export_workspace", 1, SandboxError("lost"))]
)
async def test_a_sandbox_that_dies_in_the_middle_is_not_scored(fault: Fault) -> None:
    backend = MockBackend([fault])
    record = await play(rollouts(backend), [WRITE, DONE])
    assert (record.outcome.verdict, record.stop_reason) == (Verdict.NOT_SCORED, StopReason.INFRA_ERROR)
    assert reward(record.outcome, True, 0.1) is None
    assert not backend.live


async def test_a_sandbox_that_never_comes_costs_its_own_rollout_only() -> None:
    backend = MockBackend([Fault("create", n, SandboxError("busy")) for n in (1, 3, 4)])
    room = rollouts(backend, **{"collect.tries": 2, "collect.concurrency": 1})
    await room.start({"bad": TASK, "good": TASK})
    results = {}
    for name in ("bad", "good"):
        step = await room.turn(name, DONE, turn(), last=False)
        assert step.stop is not None
        results[name] = (await room.finish(name, step.stop)).outcome.verdict
    assert sorted(results.values()) == [Verdict.FAILED, Verdict.NOT_SCORED]
    assert not backend.live


async def test_a_grading_that_fails_is_tried_again_with_the_work_at_hand() -> None:
    record = await play(rollouts(MockBackend([Fault("import_workspace", 1, SandboxError("lost"))])), [WRITE, DONE])
    assert record.outcome.verdict is Verdict.PASSED


async def test_a_machine_without_sandboxes_stops_the_training_with_the_reason() -> None:
    room = rollouts(MockBackend([Fault("create", 1, SandboxUnavailable("install bubblewrap"))]))
    with pytest.raises(UserError, match="install bubblewrap"):
        await room.start({"r": TASK})


async def test_rollouts_run_their_calls_at_the_same_time() -> None:
    slow = TASK.model_copy(update={"limits": Limits(command_timeout_s=0.6)})
    room = rollouts(MockBackend([Fault("run", n, NEVER) for n in range(1, 9)]))
    await room.start({f"r{n}": slow for n in range(8)})
    began = asyncio.get_running_loop().time()
    sleep = render([ToolCall(name="bash", arguments={"command": "true"})], "hermes")
    steps = await asyncio.gather(*(room.turn(f"r{n}", sleep, turn(), last=False) for n in range(8)))
    assert asyncio.get_running_loop().time() - began < 3
    assert all("stopped after 0.6 s" in step.messages[0].content for step in steps)
    await room.close()


def test_rollouts_survive_the_event_loop_that_started_them() -> None:
    """ms-swift opens a new loop for each turn."""
    backend = MockBackend()
    room = rollouts(backend)
    asyncio.run(room.start({"r": TASK}))
    assert asyncio.run(room.turn("r", WRITE, turn(), last=False)).stop is None
    assert asyncio.run(room.turn("r", DONE, turn(), last=False)).stop is StopReason.FINISHED
    assert asyncio.run(room.finish("r", StopReason.FINISHED)).outcome.verdict is Verdict.PASSED


async def test_closing_kills_what_is_left() -> None:
    backend = MockBackend()
    room = rollouts(backend)
    await room.start({"a": TASK, "b": TASK})
    assert len(backend.live) == 2
    await room.close()
    assert not backend.live


async def test_a_rollout_ends_at_the_tasks_own_turn_limit() -> None:
    short = TASK.model_copy(update={"limits": Limits(max_turns=1)})
    assert (await play(rollouts(MockBackend()), [WRITE, WRITE], task=short)).stop_reason is StopReason.MAX_TURNS


async def test_a_failed_set_up_is_the_infrastructures_fault() -> None:
    broken = TASK.model_copy(update={"setup": ["false"]})
    record = await play(rollouts(MockBackend()), [DONE], task=broken)
    assert record.outcome.verdict is Verdict.NOT_SCORED
    assert "set-up of task t failed" in record.outcome.reason


async def test_a_round_says_where_its_time_went_when_its_last_rollout_is_graded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = rollouts(MockBackend())
    await room.start({"a": TASK, "b": TASK})
    await asyncio.sleep(0.2)  # the model writes
    await room.turn("a", WRITE, turn(), last=False)
    await room.finish("a", StopReason.FINISHED)
    assert "agentexecutor seconds" not in capsys.readouterr().out
    await room.turn("b", DONE, turn(), last=False)
    await room.finish("b", StopReason.FINISHED)
    (said,) = [parse(line) for line in capsys.readouterr().out.splitlines() if parse(line)]
    assert said.keys() == {"generation", "tools", "grading"}
    assert 0.19 < said["generation"] < 1
