"""Episodes: infrastructure never teaches, every await has its deadline, every sandbox is killed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from agents_kit import HANGS, Says, task, write

from agents.episode import Settings, run_episode
from agents.gather import Wanted, gather
from agents.llm import Failure, LLMError
from agents.reward import reward
from agents.scripted import MockLLM, ScriptedLLM
from agents.store import load_trajectories, read_episode, write_episode, write_trajectories
from agents.task import Task
from agents.trajectory import Outcome, StopReason, Trajectory, Verdict
from agents.verifier import grade
from configs.errors import UserError
from sandboxes import SandboxError, SandboxGone, SandboxPool, SandboxUnavailable
from sandboxes.mock import NEVER, Fault, MockBackend

SETTINGS = Settings(run_id="t", max_turns=6)


def pool_of(*faults: Fault, width: int = 4, create_timeout_s: float = 5.0) -> SandboxPool:
    return SandboxPool(MockBackend(faults), run_id="t", concurrency=width, create_timeout_s=create_timeout_s)


async def episode(llm: Says, *faults: Fault, settings: Settings = SETTINGS, which: Task | None = None) -> Trajectory:
    async with pool_of(*faults, create_timeout_s=0.2) as pool:
        trajectory = await run_episode(which or task(), lambda _: llm, pool, settings)
    assert pool.created == pool.killed
    return trajectory


async def test_an_episode_that_does_the_task_passes_and_one_that_does_not_fails() -> None:
    good = await episode(Says([write("a.txt"), "Done."]))
    assert (good.outcome.verdict, good.stop_reason, good.tries) == (Verdict.PASSED, StopReason.FINISHED, 1)
    assert good.extra == {"well_formed": True}
    assert set(good.timings) == {"create", "setup", "generate", "tools", "export", "grade", "total"}
    bad = await episode(Says([write("b.txt"), "Done."]))
    assert (bad.outcome.verdict, bad.outcome.reason) == (Verdict.FAILED, "the checks exited 1")


async def test_behaviour_1_a_sandbox_that_dies_starts_a_new_try_with_none_of_the_old_messages() -> None:
    llm = Says(["first words " + write("b.txt"), write("a.txt"), "Done."])
    trajectory = await episode(llm, Fault("write_file", 1, SandboxGone("gone")))
    assert (trajectory.outcome.verdict, trajectory.tries) == (Verdict.PASSED, 2)
    assert [m.role for m in llm.seen[1]] == ["system", "user"]
    assert not any("first words" in m.content for m in trajectory.messages)


async def test_behaviour_1_after_the_last_try_the_episode_is_not_scored_and_has_no_reward() -> None:
    faults = [Fault("write_file", n, SandboxGone("gone for good")) for n in (1, 2, 3)]
    trajectory = await episode(Says([write("a.txt")] * 3), *faults)
    assert (trajectory.outcome.verdict, trajectory.stop_reason, trajectory.tries) == (
        Verdict.NOT_SCORED,
        StopReason.INFRA_ERROR,
        3,
    )
    assert "gone for good" in trajectory.outcome.reason
    assert reward(trajectory.outcome, True, 0.1) is None


async def test_a_failure_of_grading_alone_grades_again_and_keeps_the_agents_work() -> None:
    llm = Says([write("a.txt"), "Done."])
    trajectory = await episode(llm, Fault("import_workspace", 1, SandboxError("network")))
    assert (trajectory.outcome.verdict, trajectory.tries, len(llm.seen)) == (Verdict.PASSED, 1, 2)


@pytest.mark.parametrize("operation", ["create", "quiesce", "export_workspace", "import_workspace"])
async def test_behaviour_4_an_operation_that_never_returns_ends_at_its_deadline_and_is_tried_anew(
    operation: str,
) -> None:
    settings = replace(SETTINGS, files_timeout_s=0.2, grade=partial(grade, files_s=0.2))
    async with asyncio.timeout(5):
        trajectory = await episode(
            Says([write("a.txt"), "Done.", write("a.txt"), "Done."]), Fault(operation, 1, NEVER), settings=settings
        )
    assert trajectory.outcome.verdict is Verdict.PASSED


async def test_behaviour_4_a_model_that_never_answers_is_not_scored_with_the_right_reason() -> None:
    settings = replace(SETTINGS, turn_timeout_s=0.05)
    trajectory = await episode(Says([HANGS] * 3), settings=settings)
    assert (trajectory.outcome.verdict, trajectory.stop_reason) == (Verdict.NOT_SCORED, StopReason.INFRA_ERROR)
    assert trajectory.extra["failure"] == "timeout"


async def test_behaviour_7_three_unparsable_turns_are_a_real_zero() -> None:
    trajectory = await episode(Says(["<tool_call>x</tool_call>"] * 3))
    assert (trajectory.outcome.verdict, trajectory.stop_reason) == (Verdict.FAILED, StopReason.PARSE_ERROR)
    assert reward(trajectory.outcome, bool(trajectory.extra["well_formed"]), 0.1) == 0.0


@pytest.mark.parametrize("reason", [Failure.CONTENT_POLICY, Failure.BAD_REQUEST])
async def test_a_final_refusal_of_the_provider_is_not_scored_and_not_tried_again(reason: Failure) -> None:
    trajectory = await episode(Says([LLMError(reason, "no")]))
    assert (trajectory.outcome.verdict, trajectory.stop_reason, trajectory.tries) == (
        Verdict.NOT_SCORED,
        StopReason.AGENT_ERROR,
        1,
    )
    assert trajectory.extra["fatal"] is False


async def test_behaviour_2_one_of_eight_episodes_raises_and_the_other_seven_have_results() -> None:
    def make(which: Task) -> ScriptedLLM:
        if which.id == "t3":
            raise RuntimeError("a defect of ours")
        return ScriptedLLM(which)

    kept: list[Trajectory] = []
    async with pool_of() as pool:
        wanted = [Wanted(task(f"t{n}"), 0) for n in range(8)]
        results = await gather(wanted, make, pool, SETTINGS, concurrency=4, keep=kept.append)
    assert [t.task_id for t in results] == [f"t{n}" for n in range(8)]
    assert [t.outcome.verdict for t in results].count(Verdict.PASSED) == 7
    assert (results[3].outcome.verdict, results[3].outcome.reason) == (
        Verdict.NOT_SCORED,
        "RuntimeError: a defect of ours",
    )
    assert "Traceback" in results[3].outcome.detail
    assert len(kept) == 8


async def test_behaviour_21_a_bad_key_stops_all_episodes_at_once_and_keeps_the_finished_ones() -> None:
    asked: list[str] = []

    def make(which: Task) -> Says | ScriptedLLM:
        asked.append(which.id)
        return ScriptedLLM(which) if which.id == "t0" else Says([LLMError(Failure.BAD_KEY, "Incorrect API key")])

    kept: list[Trajectory] = []
    async with pool_of() as pool:
        with pytest.raises(UserError, match="bad_key: Incorrect API key"):
            await gather(
                [Wanted(task(f"t{n}"), 0) for n in range(20)], make, pool, SETTINGS, concurrency=1, keep=kept.append
            )
    assert asked == ["t0", "t1"]
    assert [t.task_id for t in kept] == ["t0"]
    assert pool.created == pool.killed


async def test_cancelling_kills_every_sandbox_and_is_not_swallowed() -> None:
    llm = Says([HANGS])
    async with pool_of() as pool:
        running = asyncio.create_task(run_episode(task(), lambda _: llm, pool, SETTINGS))
        await llm.asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert pool.created == pool.killed == 1


async def test_a_workspace_too_large_to_take_is_the_agents_own_failure() -> None:
    files = [write(f"big{n}.txt", "x" * 7_000_000) for n in range(10)]
    trajectory = await episode(Says([*files, "Done."]), settings=replace(SETTINGS, max_turns=20))
    assert trajectory.outcome.verdict is Verdict.FAILED
    assert "cannot be taken" in trajectory.outcome.reason


async def test_the_mock_model_writes_the_file_that_the_prompt_names_then_finishes() -> None:
    which = task(path="hi.py", prompt="create /workspace/hi.py")
    async with pool_of() as pool:
        trajectory = await run_episode(which, lambda _: MockLLM(), pool, SETTINGS)
    assert trajectory.outcome.verdict is Verdict.PASSED
    assert trajectory.stop_reason is StopReason.FINISHED


async def test_a_failing_setup_command_is_the_infrastructures_failure() -> None:
    trajectory = await episode(Says([write("a.txt"), "Done."]), which=task(setup=["false"]))
    assert trajectory.outcome.verdict is Verdict.NOT_SCORED
    assert "set-up of task t failed: 'false' exited 1" in trajectory.outcome.reason


def test_form_never_beats_the_verdict_and_not_scored_is_never_zero() -> None:
    outcomes = {verdict: Outcome(verdict=verdict) for verdict in Verdict}
    assert [reward(outcomes[Verdict.PASSED], form, 0.2) for form in (True, False)] == [1.0, 1.0]
    assert [reward(outcomes[Verdict.FAILED], form, 0.2) for form in (True, False)] == [0.2, 0.0]
    assert [reward(outcomes[Verdict.NOT_SCORED], form, 0.2) for form in (True, False)] == [None, None]


async def test_a_backend_that_cannot_run_here_stops_all_episodes_at_once_and_says_how_to_fix_it() -> None:
    faults = [Fault("create", n, SandboxUnavailable("bubblewrap is missing: install it")) for n in range(1, 9)]
    async with pool_of(*faults) as pool:
        with pytest.raises(UserError, match="bubblewrap is missing: install it"):
            await gather(
                [Wanted(task(f"t{n}"), 0) for n in range(8)], ScriptedLLM, pool, SETTINGS, concurrency=1, keep=print
            )
    assert pool.created == 0


async def test_text_that_no_file_can_hold_is_refused_as_a_call_and_stored_as_a_question_mark(tmp_path: Path) -> None:
    trajectory = await episode(Says([write("a.txt", "\ud800"), "Done."]))
    assert trajectory.outcome.verdict is Verdict.FAILED
    assert "not valid Unicode" in trajectory.messages[3].content
    assert read_episode(write_episode(tmp_path, trajectory)) == trajectory
    write_trajectories(tmp_path / "t.parquet", [trajectory])
    assert load_trajectories(tmp_path / "t.parquet") == [trajectory]
