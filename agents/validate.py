"""Acceptance of tasks: the reference solution passes, and doing nothing fails. Both by real episodes, graded as any other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agents.episode import Settings
from agents.gather import Wanted, gather
from agents.llm import LLM, Reply
from agents.scripted import ScriptedLLM
from agents.task import Task, load_tasks
from agents.tools import TOOLS
from agents.trajectory import Message, Trajectory, Verdict
from agents.turns import problems
from configs.profile import Profile
from configs.run import Progress
from sandboxes import SandboxPool, make_for

REFERENCE: Final = 0
"""Attempt number of the reference solution's episode; doing nothing is the next."""


@dataclass(frozen=True, slots=True)
class _Idle:
    """Does nothing and says that it is done."""

    name: str = "nothing"

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        return Reply(Message(role="assistant", content="Done."))


async def validate_tasks(
    tasks: Sequence[Task],
    pool: SandboxPool,
    *,
    concurrency: int = 4,
    ended: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, str]:
    """Task id → why it is refused. An empty result accepts all. `ended(done, total)` is called after each episode.

    A task that could not be scored is refused as well, with the infrastructure's own words: acceptance is proved or not given.
    """
    refused = {task.id: why for task in tasks if (why := _unfit(task)) is not None}
    fit = [task for task in tasks if task.id not in refused]
    settings = Settings(tools=tuple(TOOLS), run_id=pool.run_id, max_turns=200)
    done: list[Trajectory] = []

    def keep(trajectory: Trajectory) -> None:
        done.append(trajectory)
        ended(len(done), 2 * len(fit))

    for attempt, make in ((REFERENCE, _reference), (REFERENCE + 1, _idle)):
        wanted = [Wanted(task, attempt) for task in fit]
        await gather(wanted, make, pool, settings, concurrency=concurrency, keep=keep)
    for trajectory in sorted(done, key=lambda t: t.attempt):
        why = _refusal(trajectory)
        if why is not None:
            refused.setdefault(trajectory.task_id, why)
    return {task.id: refused[task.id] for task in tasks if task.id in refused}


def validate_file(profile: Profile, path: Path, report: Callable[[Progress], None]) -> tuple[dict[str, str], int]:
    """`validate_tasks` of a file with the profile's backend: the refusals, and how many tasks there are."""
    tasks = load_tasks(path)
    width = profile.collect.concurrency

    async def main() -> dict[str, str]:
        pool = SandboxPool(
            make_for(profile.sandboxes),
            run_id=f"validate-{uuid.uuid4().hex[:8]}",
            concurrency=width,
            lifetime_s=profile.sandboxes.lifetime_s,
        )
        async with pool:
            return await validate_tasks(
                tasks, pool, concurrency=width, ended=lambda done, total: report(Progress("validate", done, total))
            )

    return asyncio.run(main()), len(tasks)


def _reference(task: Task) -> LLM:
    return ScriptedLLM(task)


def _idle(task: Task) -> LLM:
    return _Idle()


def _unfit(task: Task) -> str | None:
    """What can be seen without running it."""
    if not task.solution:
        return "it has no reference solution"
    for number, call in enumerate(task.solution, start=1):
        wrong = problems([call], list(TOOLS))[0]
        if wrong is not None:
            return f"call {number} of its solution is wrong: {wrong}"
    return None


def _refusal(trajectory: Trajectory) -> str | None:
    verdict, reason = trajectory.outcome.verdict, trajectory.outcome.reason
    if verdict is Verdict.NOT_SCORED:
        return f"it could not be scored: {reason}"
    if trajectory.attempt == REFERENCE and verdict is Verdict.FAILED:
        return f"its reference solution fails: {reason} {trajectory.outcome.detail.strip()[-300:]}".rstrip()
    if trajectory.attempt != REFERENCE and verdict is Verdict.PASSED:
        return "doing nothing passes: its checks prove nothing"
    return None
