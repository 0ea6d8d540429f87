"""The episodes of an evaluation: policies × tasks × attempts, so many at once, against one server, each finished one stored at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agents.episode import Settings
from agents.gather import Wanted, gather
from agents.policy import PolicyLLM
from agents.store import episode_path, read_episode, write_episode
from agents.task import Task
from agents.trajectory import Trajectory, Verdict
from configs.errors import UserError, WorkFailed
from configs.run import Run
from sandboxes.base import SandboxUnavailable
from sandboxes.pool import SandboxPool
from sandboxes.registry import make_for
from training.clock import START, shared
from training.results import Row, row_of
from training.serve import PolicyServer, serve

AGENT: Final = "builtin"
CHECK_S: Final = 1.0
"""Seconds between looks at the server."""


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    """Its name on the server, and in the report."""
    store: Path
    """Folder of its finished episodes; its name is a digest of everything but the task that decides them."""


@dataclass(frozen=True, slots=True)
class Plan:
    tasks: Sequence[Task]
    policies: Sequence[Policy]
    attempts: int


@dataclass
class Gathered:
    """All episodes of a plan, in its order."""

    rows: list[Row]
    reused: int
    start_s: float = 0.0
    """Seconds of the server's start; 0 when it was not needed."""
    episodes_s: float = 0.0
    """Seconds on the clock of all episodes together."""
    engine: str = "none"
    time: dict[str, float] = field(default_factory=dict)
    """Seconds on the clock by phase; the episodes' are shared out in proportion to their own timings."""
    peak_memory_gib: float | None = None
    """Of the server."""


Place = tuple[str, str, int]
"""Policy, task id, attempt."""


@dataclass
class HeldoutEpisodes:
    run: Run
    plan: Plan
    adapters: Mapping[str, Path]
    reuse: bool = True
    """Whether stored episodes count; False runs all of them again."""
    done: dict[Place, Trajectory] = field(default_factory=dict)

    def run_missing(self) -> Gathered:
        """Run what is missing. Raises `WorkFailed` when the server dies and `UserError` where sandboxes cannot run; what is finished is kept."""
        places = [
            (policy, task, attempt)
            for policy in self.plan.policies
            for task in self.plan.tasks
            for attempt in range(self.plan.attempts)
        ]
        for policy, task, attempt in places:
            stored = self._stored(policy, task, attempt)
            if stored is not None:
                self.done[policy.name, task.id, attempt] = stored
        outcome = Gathered([], len(self.done))
        missing = [place for place in places if (place[0].name, place[1].id, place[2]) not in self.done]
        if missing:
            self._progress(len(places))
            asyncio.run(
                self._sandboxes_run()
            )  # a machine without bubblewrap is told so now, and not after a minute of loading
            with serve(self.run, self.adapters) as server:
                started = time.monotonic()
                asyncio.run(self._hold(server, missing, len(places)))
                outcome.start_s, outcome.engine = server.start_s, server.engine
                outcome.episodes_s = time.monotonic() - started
                outcome.peak_memory_gib = round(server.peak_bytes / 2**30, 2)
            ran = [self.done[policy.name, task.id, attempt].timings for policy, task, attempt in missing]
            outcome.time = {START: round(outcome.start_s, 1), **shared(outcome.episodes_s, ran)}
        outcome.rows = [
            row_of(policy.name, self.done[policy.name, task.id, attempt]) for policy, task, attempt in places
        ]
        return outcome

    def _stored(self, policy: Policy, task: Task, attempt: int) -> Trajectory | None:
        if not self.reuse:
            return None
        try:
            found = read_episode(episode_path(policy.store, task.digest, AGENT, policy.name, attempt))
        except (FileNotFoundError, UserError):
            return None  # never finished, or damaged: it is run again
        # Tasks are stored by content: the same task under a new name is the same episode.
        return (
            None
            if found.outcome.verdict is Verdict.NOT_SCORED
            else found.model_copy(update={"task_id": task.id, "family": task.family})
        )

    def _pool(self) -> SandboxPool:
        profile = self.run.profile
        return SandboxPool(
            make_for(profile.sandboxes),
            run_id=self.run.run_id,
            concurrency=profile.evaluate.concurrency,
            lifetime_s=profile.sandboxes.lifetime_s,
        )

    async def _sandboxes_run(self) -> None:
        try:
            async with self._pool() as pool, pool.sandbox():
                pass
        except SandboxUnavailable as error:
            raise UserError(str(error)) from None

    async def _hold(self, server: PolicyServer, missing: Sequence[tuple[Policy, Task, int]], total: int) -> None:
        """Policy by policy: each adapter is loaded once, and what ends early is whole for the policies before."""
        groups: dict[tuple[Policy, int], list[Wanted]] = {}
        for policy, task, attempt in missing:
            groups.setdefault((policy, attempt), []).append(Wanted(task, attempt))

        async def episodes() -> None:
            async with self._pool() as pool:
                for (policy, attempt), wanted in groups.items():
                    await self._group(server, policy, attempt, wanted, pool, total)
                    if any(
                        self.done[policy.name, item.task.id, attempt].outcome.verdict is Verdict.NOT_SCORED
                        for item in wanted
                    ):
                        await asyncio.sleep(2 * CHECK_S)  # episodes can fail faster than a dead server is noticed
                        server.check()
            watch.cancel()

        try:
            async with asyncio.TaskGroup() as both:
                watch = both.create_task(_watch(server))
                both.create_task(episodes())
        except* (WorkFailed, UserError) as failures:
            raise failures.exceptions[0] from None

    async def _group(
        self, server: PolicyServer, policy: Policy, attempt: int, wanted: list[Wanted], pool: SandboxPool, total: int
    ) -> None:
        profile = self.run.profile
        settings = Settings(
            tools=profile.collect.tools,
            max_turns=profile.collect.max_turns,
            max_tokens=profile.evaluate.max_tokens,
            tries=profile.collect.tries,
            agent=AGENT,
            run_id=self.run.run_id,
        )
        model = PolicyLLM(
            server.url,
            policy.name,
            profile.model.agent_template,
            temperature=profile.evaluate.temperature,
            # Attempts differ, and the same attempt is the same again. vLLM on CPU dies of a seeded request whose prompt it prefills in parts.
            seed=None if profile.on_cpu and server.engine == "vllm" else profile.seed + attempt,
        )

        def keep(trajectory: Trajectory) -> None:
            if trajectory.outcome.verdict is not Verdict.NOT_SCORED:
                write_episode(policy.store, trajectory)
            self.done[policy.name, trajectory.task_id, attempt] = trajectory
            self._progress(total)

        async with model:
            await gather(wanted, lambda _: model, pool, settings, concurrency=profile.evaluate.concurrency, keep=keep)

    def _progress(self, total: int) -> None:
        passes, scored = Counter[str](), Counter[str]()
        for (policy, _, _), trajectory in self.done.items():
            passes[policy] += trajectory.outcome.verdict is Verdict.PASSED
            scored[policy] += trajectory.outcome.verdict is not Verdict.NOT_SCORED
        note = ", ".join(f"{policy} {passes[policy]}/{scored[policy]}" for policy in scored)
        self.run.progress(
            "evaluate", len(self.done), total, note, **{policy: passes[policy] / n for policy, n in scored.items() if n}
        )


async def _watch(server: PolicyServer) -> None:
    """Ends the evaluation when the server is dead, instead of letting each episode find out by itself."""
    while True:
        server.check()
        await asyncio.sleep(CHECK_S)
