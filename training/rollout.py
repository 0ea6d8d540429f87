"""The sandbox side of GRPO rollouts: one sandbox per rollout, the policy's calls run in it, the end graded in a fresh one. Knows nothing of ms-swift.

ms-swift drives it turn by turn (training/scheduler.py). It never raises for a failed sandbox: such a rollout ends `not_scored`. Everything runs in
the background loop of this process (sandboxes/background.py), because ms-swift opens a new event loop for each turn.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agents.loop import UNPARSABLE
from agents.parsing import parse
from agents.prompts import initial_messages
from agents.task import Task
from agents.tools import schemas
from agents.trajectory import Message, Outcome, StopReason, Trajectory, Turn, Usage, Verdict
from agents.turns import answer
from agents.verifier import grade, prepare, take_workspace
from configs.errors import UserError
from configs.load import load_profile
from configs.profile import Profile
from sandboxes.background import in_background
from sandboxes.base import Backend, FileRefused, Sandbox, SandboxError, SandboxUnavailable
from sandboxes.pool import SandboxPool
from sandboxes.registry import make_for
from training.clock import GENERATION, PHASE_OF, Clock, line

PROFILE_VARIABLE: Final = "AGENTEXECUTOR_RUN_PROFILE"
"""Path of the run's stored profile.yaml, for the plugin inside the trainer."""
RUN_ID_VARIABLE: Final = "AGENTEXECUTOR_RUN_ID"

ROLLOUTS: Final = "rollouts"
"""Folder of `rank<N>.jsonl` beside the checkpoints: one trajectory a line, appended when a step is scored."""

UNBOUNDED: Final = 10_000
"""Slots of the pool: ms-swift holds all rollouts of a step at once, so a bound below that would wait for itself. Creation is throttled instead."""


@dataclass
class Live:
    """One rollout under way."""

    task: Task
    messages: list[Message]
    clock: Clock
    box: Sandbox | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    turns: list[Turn] = field(default_factory=list)
    tries: int = 0
    unparsable: int = 0
    """Unparsable turns in a row."""
    well_formed: bool = False
    broken: str = ""
    """Why the infrastructure failed; such a rollout is not scored."""
    detail: str = ""
    timings: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("create", "setup", "tools", "export", "grade"), 0.0)
    )
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            with self.clock.doing(PHASE_OF[phase]):
                yield
        finally:
            self.timings[phase] += time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Step:
    """What follows a turn: tool messages for the next one, or why there is none."""

    messages: list[Message]
    stop: StopReason | None


class Rollouts:
    """All rollouts of one trainer process. `close` kills what is left; the kernel and the sandboxes' lifetime do where it cannot run."""

    def __init__(self, profile: Profile, run_id: str, backend: Backend | None = None) -> None:
        self.profile = profile
        lifetime_s = profile.sandboxes.lifetime_s
        self.pool = SandboxPool(
            backend or make_for(profile.sandboxes), run_id=run_id, concurrency=UNBOUNDED, lifetime_s=lifetime_s
        )
        self.live: dict[str, Live] = {}
        self.clock = Clock()
        self._unfinished = 0
        self._at_once = asyncio.Semaphore(profile.collect.concurrency)

    async def start(self, tasks: Mapping[str, Task]) -> None:
        """A prepared sandbox for each rollout id, concurrently. Raises `UserError` where sandboxes cannot run on this machine at all."""
        await in_background(self._start(tasks))

    async def turn(self, rollout: str, text: str, turn: Turn, *, last: bool) -> Step:
        """Take one assistant turn and run its calls; `last` says that no turn may follow."""
        return await in_background(self._turn(self.live[rollout], text, turn, last))

    async def finish(self, rollout: str, stop: StopReason) -> Trajectory:
        """Kill the rollout's sandbox, grade its workspace in a fresh one, and return the record."""
        return await in_background(self._finish(self.live.pop(rollout), stop))

    async def close(self) -> None:
        await in_background(self.pool.close())

    async def _start(self, tasks: Mapping[str, Task]) -> None:
        for rollout, task in tasks.items():
            self.live[rollout] = Live(task, initial_messages(task), self.clock)
        self._unfinished += len(tasks)
        results = await asyncio.gather(*(self._open(self.live[rollout]) for rollout in tasks), return_exceptions=True)
        for result in results:
            if isinstance(result, SandboxUnavailable):
                raise UserError(str(result))
            if isinstance(result, BaseException):
                raise result
        self.clock.idle(GENERATION)

    async def _open(self, live: Live) -> None:
        """A rollout has no tokens yet, so a failed creation or set-up is simply tried again."""
        while True:
            live.tries += 1
            try:
                async with self._at_once:
                    with live.timed("create"):
                        live.box = await live.stack.enter_async_context(self.pool.sandbox())
                    with live.timed("setup"):
                        await prepare(live.task, live.box)
                return
            except SandboxUnavailable:
                raise
            except SandboxError as error:
                live.box = None
                await live.stack.aclose()
                if live.tries >= self.profile.collect.tries:
                    live.broken = f"sandbox: {error}"
                    return

    async def _turn(self, live: Live, text: str, turn: Turn, last: bool) -> Step:
        parsed = parse(text, self.profile.model.agent_template)
        live.messages.append(Message(role="assistant", content=text, tool_calls=parsed.calls))
        live.turns.append(turn)
        if live.broken or live.box is None:
            return Step([], StopReason.INFRA_ERROR)
        if turn.finish_reason == "length":
            return Step([], StopReason.MAX_TOKENS)
        if not parsed.calls and not parsed.errors:
            return Step([], StopReason.FINISHED)
        try:
            with live.timed("tools"):
                answered = await answer(
                    live.box, parsed.calls, parsed.errors, self.profile.collect.tools, live.task.limits
                )
        except SandboxError as error:
            live.broken = f"sandbox: {error}"
            return Step([], StopReason.INFRA_ERROR)
        except Exception as error:  # a defect of ours or of a library costs this rollout, and is recorded whole
            live.broken, live.detail = (
                f"{type(error).__name__}: {error}",
                "".join(traceback.format_exception(error))[-4000:],
            )
            return Step([], StopReason.INFRA_ERROR)
        live.messages += answered.messages
        live.well_formed = answered.well_formed and (live.well_formed or len(live.turns) == 1)
        live.unparsable = live.unparsable + 1 if parsed.errors else 0
        return Step(answered.messages, self._stop(live, last))

    def _stop(self, live: Live, last: bool) -> StopReason | None:
        if live.unparsable == UNPARSABLE:
            return StopReason.PARSE_ERROR
        if last or len(live.turns) >= (live.task.limits.max_turns or UNBOUNDED):
            return StopReason.MAX_TURNS
        # Only the rollout's own time counts: that of a turn is spent on all rollouts of the step.
        return StopReason.DEADLINE if live.timings["tools"] >= live.task.limits.episode_timeout_s else None

    async def _finish(self, live: Live, stop: StopReason) -> Trajectory:
        try:
            outcome = await self._outcome(live)
        except SandboxError as error:
            outcome = not_scored(f"sandbox: {error}")
        except Exception as error:  # as in _turn
            outcome = not_scored(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))[-4000:])
        finally:
            self._count_off()
            await live.stack.aclose()
        sampled = sum(len(turn.token_ids or []) for turn in live.turns)
        return Trajectory(
            task_id=live.task.id,
            task_digest=live.task.digest,
            family=live.task.family,
            agent="builtin",
            model=self.profile.model.id,
            attempt=0,
            tries=max(1, live.tries),
            tools=schemas(self.profile.collect.tools),
            messages=live.messages,
            turns=live.turns,
            stop_reason=stop if outcome.verdict is not Verdict.NOT_SCORED else StopReason.INFRA_ERROR,
            outcome=outcome,
            usage=Usage(completion_tokens=sampled, calls=len(live.turns)),
            timings={
                phase: round(seconds, 4)
                for phase, seconds in {**live.timings, "total": time.monotonic() - live.started}.items()
            },
            run_id=self.pool.run_id,
            extra={"well_formed": live.well_formed},
        )

    def _count_off(self) -> None:
        """After the last rollout of a round no one waits for the model; the first rank, whose output is read, says where the time went."""
        self._unfinished -= 1
        if not self._unfinished:
            self.clock.idle("")
            if os.environ.get("RANK", "0") == "0":
                print(line(self.clock.take()), flush=True)

    async def _outcome(self, live: Live) -> Outcome:
        if live.broken or live.box is None:
            return not_scored(live.broken or "there was no sandbox", live.detail)
        try:
            with live.timed("export"):
                archive = await take_workspace(live.box)
        except FileRefused as error:
            return Outcome(verdict=Verdict.FAILED, reason=f"the workspace cannot be taken: {error}")
        await live.stack.aclose()  # the agent's sandbox is gone before the grading one is made
        async with self._at_once:
            with live.timed("grade"):
                for _ in range(self.profile.collect.tries - 1):
                    try:
                        return await grade(live.task, archive, self.pool)
                    except SandboxError:
                        continue
                return await grade(live.task, archive, self.pool)


def not_scored(reason: str, detail: str = "") -> Outcome:
    return Outcome(verdict=Verdict.NOT_SCORED, reason=reason, detail=detail)


def rank_run_id(run_id: str, rank: int) -> str:
    """Marks the sandboxes of one rank: when it sweeps at its end, the others' stay."""
    return f"{run_id}-rank{rank}"


def from_environment() -> Rollouts:
    """The rollouts of this rank, from what `training.grpo.command` put into its environment. Raises `UserError` where that is missing."""
    path, run_id = os.environ.get(PROFILE_VARIABLE), os.environ.get(RUN_ID_VARIABLE)
    if not path or not run_id:
        raise UserError(
            f"{PROFILE_VARIABLE} and {RUN_ID_VARIABLE} must name a stored profile and a run; start GRPO with `agentexecutor rl-train`."
        )
    # An empty environment: the stored profile is the effective one already.
    return Rollouts(load_profile(Path(path), environ={}), rank_run_id(run_id, int(os.environ.get("RANK", "0"))))
