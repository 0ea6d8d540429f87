"""Retries of one LLM call: only transient failures, with full jitter, honouring Retry-After, within a budget of calls and of waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from agents.llm import LLM, Failure, LLMError, Reply
from agents.trajectory import Message

FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Retrying:
    """An LLM that sends a failed call again.

    The wait before retry n is drawn from [0, min(30, 2ⁿ)] seconds (full jitter: episodes that failed together do not come back together), and never
    below what the provider asked for. When the next wait would exceed the budget the failure is final at once.
    """

    llm: LLM
    calls: int = 6
    """Times one turn is sent at most."""
    wait_budget_s: float = 120.0
    """Seconds of waiting for one turn at most."""
    call_timeout_s: float = 180.0
    """Deadline of one call, in seconds."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    rng: random.Random = field(default_factory=random.Random)

    @property
    def name(self) -> str:
        return self.llm.name

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        waited = 0.0
        for number in range(1, self.calls + 1):
            try:
                return await self._once(messages, tools, max_tokens)
            except LLMError as error:
                if not error.retryable or number == self.calls:
                    raise
                wait = self.rng.uniform(0, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)))
                if error.retry_after_s is not None:
                    wait = error.retry_after_s + self.rng.uniform(0, 1)
                if waited + wait > self.wait_budget_s:
                    raise
                waited += wait
                await self.sleep(wait)
        raise AssertionError("the loop returns or raises")

    async def _once(self, messages: list[Message], tools: list[dict[str, Any]], max_tokens: int) -> Reply:
        try:
            async with asyncio.timeout(self.call_timeout_s) as clock:
                return await self.llm.complete(messages, tools, max_tokens=max_tokens)
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise LLMError(Failure.TIMEOUT, f"{self.name} did not answer within {self.call_timeout_s:g} s") from error
