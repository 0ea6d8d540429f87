"""A policy: a model being trained, served by `swift deploy` at an OpenAI-compatible URL, reached by httpx.

The assistant's raw text goes back as it was sampled; nothing is re-rendered from parsed calls, so the next prompt continues the very same tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from agents.llm import Failure, LLMError, Reply, from_status, shorten
from agents.parsing import Format, parse
from agents.trajectory import Message, Turn, Usage
from agents.wire import to_policy


@dataclass
class PolicyLLM:
    """One served policy. `model` is the adapter's name on the server; close it (or use `async with`) when done."""

    base_url: str
    """With its `/v1`."""
    model: str
    agent_template: Format
    temperature: float = 0.0
    seed: int | None = None
    timeout_s: float = 300.0
    """Deadline of one answer, in seconds. A laptop's first call compiles."""
    details: bool = True
    """Whether to ask for token ids and log-probabilities."""
    _client: httpx.AsyncClient | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.model

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": to_policy(messages),
            "tools": tools,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.details:
            body |= {"return_details": True, "logprobs": True}
        started = time.monotonic()
        answer = await self._post(body)
        choice = _choice(answer)
        text = choice["message"].get("content") or ""
        parsed = parse(text, self.agent_template)
        usage = answer.get("usage") or {}
        ids = choice.get("token_ids")
        turn = Turn(
            prompt_token_ids=answer.get("prompt_token_ids"),
            token_ids=ids,
            logprobs=[float(item["logprob"]) for item in (choice.get("logprobs") or {}).get("content") or []] or None,
            loss_mask=None if ids is None else [1] * len(ids),
            finish_reason=choice.get("finish_reason") or "",
            seconds=round(time.monotonic() - started, 4),
        )
        return Reply(
            message=Message(role="assistant", content=text, tool_calls=parsed.calls),
            errors=parsed.errors,
            # A local model has no price: the cost stays None.
            usage=Usage(
                prompt_tokens=usage.get("prompt_tokens") or 0,
                completion_tokens=usage.get("completion_tokens") or 0,
                calls=1,
            ),
            turn=turn,
            finish_reason=choice.get("finish_reason") or "stop",
        )

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._client is None:
            limits = httpx.Limits(max_connections=None)  # throttled by the number of episodes, not here
            self._client = httpx.AsyncClient(timeout=self.timeout_s, limits=limits, trust_env=False)
        try:
            response = await self._client.post(f"{self.base_url.rstrip('/')}/chat/completions", json=body)
        except httpx.TimeoutException as error:
            raise LLMError(Failure.TIMEOUT, f"{self.base_url} did not answer within {self.timeout_s:g} s") from error
        except httpx.ConnectError as error:
            raise LLMError(Failure.NO_CONNECTION, f"{self.base_url}: {error}") from error
        except httpx.HTTPError as error:
            raise LLMError(Failure.CUT_ANSWER, f"{self.base_url}: {type(error).__name__} {error}") from error
        if response.status_code >= 400:
            raise from_status(response.status_code, response.text, response.headers)
        try:
            answer = response.json()
        except ValueError as error:
            raise LLMError(Failure.NOT_AN_ANSWER, f"{self.base_url} sent {shorten(response.text, 80)!r}") from error
        if not isinstance(answer, dict):
            raise LLMError(Failure.NOT_AN_ANSWER, f"{self.base_url} sent {shorten(response.text, 80)!r}")
        return answer

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise LLMError(Failure.NOT_AN_ANSWER, f"no chat completion: {shorten(str(answer), 80)}")
    if not choices:
        raise LLMError(Failure.EMPTY_ANSWER, "the answer has no choice")
    if not isinstance(choices[0], dict) or not isinstance(choices[0].get("message"), dict):
        raise LLMError(Failure.NOT_AN_ANSWER, f"a choice without a message: {shorten(str(choices[0]), 80)}")
    choice: dict[str, Any] = choices[0]
    return choice
