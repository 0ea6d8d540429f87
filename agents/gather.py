"""Many episodes at once, in-process: a failure costs one, a fatal one stops all, and finished ones are kept whatever comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.episode import Settings, run_episode
from agents.llm import MakeLLM
from agents.task import Task
from agents.trajectory import Trajectory
from configs.errors import UserError
from sandboxes.pool import SandboxPool


@dataclass(frozen=True, slots=True)
class Wanted:
    """One episode to run."""

    task: Task
    attempt: int


async def gather(
    wanted: Sequence[Wanted],
    make_llm: MakeLLM,
    pool: SandboxPool,
    settings: Settings,
    *,
    concurrency: int,
    keep: Callable[[Trajectory], None],
) -> list[Trajectory]:
    """Run the episodes, `concurrency` at once, and return them in the order wanted. `keep` is called as each one ends.

    Raises `UserError` at the first failure that every other episode would meet too (a bad key, no sandboxes here), and what `keep` raises; what ended
    before has been kept.
    """
    results: dict[int, Trajectory] = {}
    places = iter(range(len(wanted)))

    async def work() -> None:
        for place in places:
            item = wanted[place]
            trajectory = await run_episode(item.task, make_llm, pool, settings, attempt=item.attempt)
            if trajectory.extra.get("fatal"):
                raise _Fatal(trajectory.outcome.reason)
            results[place] = trajectory
            keep(trajectory)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(wanted))):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
        if not isinstance(first, _Fatal):
            raise first from None  # a full disk, as a rule: the sentence, without the task group around it
        raise UserError(
            f"{first}. Every other episode would meet this too, so the collection has stopped; what is finished is kept."
        ) from None
    return [results[place] for place in sorted(results)]


class _Fatal(Exception):
    """Carries the reason through the task group."""
