"""One episode: fresh sandbox, agent loop, grading in another fresh sandbox, one trajectory. Infrastructure failures start it anew."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agents.llm import LLM, LLMError, MakeLLM
from agents.loop import TURN_TIMEOUT_S, LoopResult, run_loop
from agents.prompts import initial_messages
from agents.task import Task
from agents.tools import schemas
from agents.trajectory import Message, Outcome, StopReason, Trajectory, Verdict
from agents.verifier import FILES_TIMEOUT_S, grade, prepare, take_workspace
from sandboxes.base import FileRefused, SandboxError, SandboxUnavailable
from sandboxes.pool import SandboxPool

Grade = Callable[[Task, bytes, SandboxPool], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an episode needs besides its task and its model. Profiles provide it (agents/collect.py, training/evaluate.py)."""

    tools: Sequence[str] = ("bash", "write_file")
    max_turns: int = 20
    max_tokens: int = 2048
    """Tokens of one turn."""
    tries: int = 3
    """Fresh starts after infrastructure failures, the first one included."""
    agent: str = "builtin"
    run_id: str = ""
    grade: Grade | None = grade
    """None leaves the episode not scored (`agentexecutor run`, which has nothing to check)."""
    turn_timeout_s: float = TURN_TIMEOUT_S
    """Deadline of one turn of the model, retries included, in seconds."""
    files_timeout_s: float = FILES_TIMEOUT_S
    """Deadline of one file call or of moving the workspace out of the agent's sandbox, in seconds."""


@dataclass
class _Try:
    """One start: what the trajectory takes from it."""

    loop: LoopResult
    timings: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("create", "setup", "export", "grade"), 0.0)
    )
    outcome: Outcome | None = None
    archive: bytes | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.timings[phase] += time.monotonic() - started


async def run_episode(
    task: Task, make_llm: MakeLLM, pool: SandboxPool, settings: Settings, *, attempt: int = 0
) -> Trajectory:
    """Run one episode to its record. Never raises but on cancellation: every failure becomes a `not_scored` trajectory with its reason.

    `extra` holds `well_formed`, and for a failure that every further episode would meet as well `fatal: true`.
    """
    trajectory, _ = await run_and_keep(task, make_llm, pool, settings, attempt=attempt)
    return trajectory


async def run_and_keep(
    task: Task, make_llm: MakeLLM, pool: SandboxPool, settings: Settings, *, attempt: int = 0
) -> tuple[Trajectory, bytes | None]:
    """`run_episode`, with the archive of the workspace where the agent got that far."""
    started = time.monotonic()
    name = "unknown"
    tries, now = 0, _Try(LoopResult(initial_messages(task)))
    stop, outcome = StopReason.INFRA_ERROR, _not_scored("it has not run")
    extra: dict[str, Any] = {}
    while tries < settings.tries:
        tries += 1
        now = _Try(LoopResult(initial_messages(task)))  # nothing of an earlier try stays
        try:
            llm = make_llm(task)
            name = llm.name
            await _attempt(task, llm, pool, settings, now)
            stop, outcome = now.loop.stop_reason, now.outcome or _not_scored("nothing was graded")
            extra = {"well_formed": now.loop.well_formed}
            break
        except LLMError as error:
            stop, outcome = error.policy.stop, _not_scored(f"model: {error}")
            extra = {"failure": str(error.reason), "fatal": error.policy.fatal}
            if stop is not StopReason.INFRA_ERROR:
                break
        except SandboxError as error:
            stop, outcome = StopReason.INFRA_ERROR, _not_scored(f"sandbox: {error}")
            extra = {"failure": type(error).__name__, "fatal": isinstance(error, SandboxUnavailable)}
            if extra["fatal"]:
                break
        except (
            Exception
        ) as error:  # a defect of ours, or of a library: it costs this episode and no other, and is shown whole
            stop = StopReason.INFRA_ERROR
            outcome = _not_scored(
                f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))[-4000:]
            )
            extra = {"failure": type(error).__name__, "fatal": False}
            break
    timings: dict[str, float] = {**now.timings, **now.loop.timings, "total": time.monotonic() - started}
    return Trajectory(
        task_id=task.id,
        task_digest=task.digest,
        family=task.family,
        agent=settings.agent,
        model=name,
        attempt=attempt,
        tries=tries,
        tools=schemas(settings.tools),
        messages=[_clean(message) for message in now.loop.messages],
        turns=now.loop.turns,
        stop_reason=stop,
        outcome=outcome,
        usage=now.loop.usage,
        timings={phase: round(seconds, 4) for phase, seconds in timings.items()},
        run_id=settings.run_id,
        extra={"well_formed": False, **extra},
    ), now.archive


async def _attempt(task: Task, llm: LLM, pool: SandboxPool, settings: Settings, now: _Try) -> None:
    began = time.monotonic()
    async with pool.sandbox() as box:
        now.timings["create"] += time.monotonic() - began
        with now.timed("setup"):
            await prepare(task, box, files_s=settings.files_timeout_s)
        await run_loop(
            task,
            box,
            llm,
            settings.tools,
            max_turns=settings.max_turns,
            max_tokens=settings.max_tokens,
            result=now.loop,
            turn_timeout_s=settings.turn_timeout_s,
        )
        with now.timed("export"):
            try:
                now.archive = await take_workspace(box, files_s=settings.files_timeout_s)
            except FileRefused as error:
                now.outcome = Outcome(verdict=Verdict.FAILED, reason=f"the workspace cannot be taken: {error}")
    # The agent's sandbox is gone before the grading one is made: no daemon of it lives, and an episode holds one slot at a time.
    if now.archive is None:
        return
    if settings.grade is None:
        now.outcome = _not_scored("there is nothing to check")
        return
    with now.timed("grade"):
        now.outcome = await _graded(task, now.archive, pool, settings.grade, settings.tries)


async def _graded(task: Task, archive: bytes, pool: SandboxPool, check: Grade, tries: int) -> Outcome:
    """Grade again where only the grading's infrastructure failed: the agent's work is paid for and at hand."""
    for _ in range(tries - 1):
        try:
            return await check(task, archive, pool)
        except SandboxUnavailable:
            raise
        except SandboxError:
            continue
    return await check(task, archive, pool)


def _not_scored(reason: str, detail: str = "") -> Outcome:
    return Outcome(verdict=Verdict.NOT_SCORED, reason=reason, detail=detail)


def _clean(message: Message) -> Message:
    """A lone surrogate, which JSON can carry and no file can hold, becomes `?`."""
    return message if _encodable(message) else Message.model_validate(_scrub(message.model_dump()))


def _encodable(message: Message) -> bool:
    try:
        message.model_dump_json()
    except (UnicodeEncodeError, ValueError):
        return False
    return True


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_scrub(key): _scrub(item) for key, item in value.items()}
    return [_scrub(item) for item in value] if isinstance(value, list) else value
