"""The builtin agent: ask the model, run its calls, show it the results, until it is done or a limit is met. One attempt, no retries here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from agents.llm import LLM, Failure, LLMError, Reply
from agents.prompts import initial_messages
from agents.task import Task
from agents.tools import schemas
from agents.trajectory import Message, StopReason, Turn, Usage
from agents.turns import answer
from sandboxes.base import Sandbox

UNPARSABLE: Final = 3
"""Unparsable turns in a row that end an episode."""

TURN_TIMEOUT_S: Final = 900.0
"""Deadline of one turn of the model, retries included, in seconds. Beyond it the provider is at fault and not the agent."""


@dataclass
class LoopResult:
    """What happened; filled while it happens, so that a failure in the middle leaves the part before it."""

    messages: list[Message]
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = StopReason.CANCELLED
    usage: Usage = field(default_factory=Usage)
    timings: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "tools": 0.0})
    """Seconds by phase."""
    well_formed: bool = False
    """Whether there was a tool call, and every one could be run: doing nothing is not good form."""


async def run_loop(
    task: Task,
    box: Sandbox,
    llm: LLM,
    tools: Sequence[str],
    *,
    max_turns: int,
    max_tokens: int,
    clock: Callable[[], float] = time.monotonic,
    result: LoopResult | None = None,
    turn_timeout_s: float = TURN_TIMEOUT_S,
) -> LoopResult:
    """Run the agent in a prepared sandbox. `max_tokens` is a turn's; `task.limits.max_turns` goes before `max_turns`.

    The episode's deadline is checked between turns: a turn or call that is under way ends by its own deadline, and so a slow provider is never
    booked as the agent's failure. Raises `LLMError` and `SandboxError`, with `result` filled so far.
    """
    done = result if result is not None else LoopResult(initial_messages(task))
    offered = schemas(tools)
    ends = clock() + task.limits.episode_timeout_s
    unparsable, first = 0, True
    for _ in range(task.limits.max_turns or max_turns):
        if clock() >= ends:
            done.stop_reason = StopReason.DEADLINE
            return done
        started = clock()
        try:
            reply = await _complete(llm, done.messages, offered, max_tokens, turn_timeout_s)
        except LLMError as error:
            if error.policy.stop is not StopReason.MAX_TOKENS:
                raise
            done.stop_reason = StopReason.MAX_TOKENS
            return done
        finally:
            done.timings["generate"] += clock() - started
        _record(done, reply)
        stop = _stop(reply)
        if stop is not None:
            done.stop_reason = stop
            return done
        started = clock()
        try:
            answered = await answer(box, reply.message.tool_calls, reply.errors, tools, task.limits)
        finally:
            done.timings["tools"] += clock() - started
        done.messages += answered.messages
        done.well_formed = answered.well_formed and (done.well_formed or first)
        first = False
        unparsable = unparsable + 1 if reply.errors else 0
        if unparsable == UNPARSABLE:
            done.stop_reason = StopReason.PARSE_ERROR
            return done
    done.stop_reason = StopReason.MAX_TURNS
    return done


def _stop(reply: Reply) -> StopReason | None:
    if reply.finish_reason == "length":
        return StopReason.MAX_TOKENS
    if not reply.message.tool_calls and not reply.errors:
        return StopReason.FINISHED
    return None


async def _complete(
    llm: LLM, messages: list[Message], offered: list[dict[str, object]], max_tokens: int, timeout_s: float
) -> Reply:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await llm.complete(messages, offered, max_tokens=max_tokens)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise LLMError(Failure.TIMEOUT, f"{llm.name} did not answer within {timeout_s:g} s") from error


def _record(done: LoopResult, reply: Reply) -> None:
    done.messages.append(reply.message)
    if reply.turn is not None:
        done.turns.append(reply.turn)
    before, now = done.usage, reply.usage
    costs = [usage.cost_usd for usage in (before, now) if usage.calls]
    done.usage = Usage(
        prompt_tokens=before.prompt_tokens + now.prompt_tokens,
        completion_tokens=before.completion_tokens + now.completion_tokens,
        # One call of unknown price makes the sum unknown.
        cost_usd=None
        if not costs or any(cost is None for cost in costs)
        else sum(cost for cost in costs if cost is not None),
        calls=before.calls + now.calls,
    )
