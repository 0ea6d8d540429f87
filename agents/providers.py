"""Paid providers through litellm, imported only when one is used (4–5 s, 190 MB).

litellm sends; retries are ours (agents/retry.py), because it maps a refused connection, an HTML page and a missing key all to InternalServerError.
The key is read from LLM_API_KEY at the call and stored nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from agents.llm import Failure, LLMError, Reply, from_status, shorten
from agents.trajectory import Message, Usage
from agents.wire import read_calls, to_provider
from configs.errors import UserError

HOSTS: Final = {"api.deepseek.com": "deepseek"}
"""Hosts whose own litellm provider knows prices and reasoning; any other endpoint speaks OpenAI's protocol."""

_CAUSES: Final = (
    ("ConnectError", Failure.NO_CONNECTION),
    ("ConnectTimeout", Failure.NO_CONNECTION),
    ("ClientConnectorError", Failure.NO_CONNECTION),
    ("RemoteProtocolError", Failure.CUT_ANSWER),
    ("ReadError", Failure.CUT_ANSWER),
    ("ClientPayloadError", Failure.CUT_ANSWER),
    ("ServerDisconnectedError", Failure.CUT_ANSWER),
    ("ClientOSError", Failure.CUT_ANSWER),
    ("ReadTimeout", Failure.TIMEOUT),
    ("ServerTimeoutError", Failure.TIMEOUT),
    ("JSONDecodeError", Failure.NOT_AN_ANSWER),
)
"""What the transport's own exception, somewhere below litellm's, says."""

_TYPES: Final = (
    ("ContextWindowExceededError", Failure.CONTEXT_OVERFLOW),
    ("ContentPolicyViolationError", Failure.CONTENT_POLICY),
    ("Timeout", Failure.TIMEOUT),
)

_WORDS: Final = (
    ("connection error", Failure.NO_CONNECTION),
    ("cannot connect to host", Failure.NO_CONNECTION),
    ("server disconnected", Failure.CUT_ANSWER),
    ("peer closed connection", Failure.CUT_ANSWER),
    ("object has no attribute 'model_dump'", Failure.NOT_AN_ANSWER),  # the client got text where it wanted an object
    ("unable to get json response", Failure.NOT_AN_ANSWER),
    ("<!doctype html", Failure.NOT_AN_ANSWER),
    ("<html", Failure.NOT_AN_ANSWER),
)
"""litellm's own wording where no cause is kept."""


@dataclass(frozen=True, slots=True)
class LiteLLM:
    """One provider model. `model` is litellm's name; with a `base_url` any name the endpoint knows."""

    model: str
    base_url: str = ""
    temperature: float = 0.7
    timeout_s: float = 180.0
    """Deadline of one answer, in seconds."""

    @property
    def name(self) -> str:
        return self.model

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        litellm = load()
        model = litellm_name(self.model, self.base_url, {str(getattr(p, "value", p)) for p in litellm.provider_list})
        try:
            answer = await litellm.acompletion(
                model=model,
                messages=to_provider(messages),
                tools=tools,
                temperature=self.temperature,
                max_tokens=max_tokens,
                api_base=self.base_url or None,
                api_key=key(),
                timeout=self.timeout_s,
                max_retries=0,
                num_retries=0,
            )
        except (
            Exception
        ) as error:  # litellm wraps everything, and some of it in bare Exceptions: the boundary of blame is here
            raise blame(error) from error
        return _reply(answer, _cost(litellm, answer))


def key() -> str:
    """The provider's key. Raises `UserError` when the environment has none."""
    found = os.environ.get("LLM_API_KEY", "").strip()
    if not found:
        raise UserError(
            "LLM_API_KEY is not set: export the key of the provider that --llm names, or use --llm scripted."
        )
    return found


def load() -> Any:
    """litellm, with its price map from the package: looking it up online would cost 16 s without a network."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    try:
        import litellm
    except ImportError:
        raise UserError(
            "litellm is not installed here: run `python3 scripts/setup_env.py`, or use --llm scripted."
        ) from None
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def litellm_name(model: str, base_url: str, providers: set[str]) -> str:
    """litellm's name for `model`: it needs to be told the provider of a custom endpoint, or it guesses one from the model's name."""
    if not base_url or ("/" in model and model.split("/", 1)[0] in providers):
        return model
    return f"{HOSTS.get(urlsplit(base_url).hostname or '', 'openai')}/{model}"


def blame(error: Exception) -> LLMError:
    """litellm's exception in our words."""
    chain = list(_chain(error))
    names = [kind.__name__ for link in chain for kind in type(link).__mro__]
    text = shorten(_without_key(str(error)))
    for name, reason in (*_TYPES, *_CAUSES):
        if name in names:
            return LLMError(reason, text)
    said = str(error).lower()
    for words, reason in _WORDS:
        if words in said:
            return LLMError(reason, text)
    status = next((s for link in chain if isinstance(s := getattr(link, "status_code", None), int) and s >= 400), None)
    if status is None:
        return LLMError(Failure.BAD_REQUEST, f"{type(error).__name__}: {text}")
    response = next((r for link in chain if (r := getattr(link, "response", None)) is not None), None)
    failure = from_status(status, str(error), getattr(response, "headers", None))
    return LLMError(failure.reason, f"HTTP {status}: {text}", failure.retry_after_s)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _without_key(text: str) -> str:
    """Some providers repeat the key in their message."""
    found = os.environ.get("LLM_API_KEY", "").strip()
    return text.replace(found, "***") if found else text


def _cost(litellm: Any, answer: Any) -> float | None:
    try:
        return float(litellm.completion_cost(completion_response=answer))
    except Exception:  # an unknown model raises several kinds; unknown is None, never 0 and never a failed episode
        return None


def _reply(answer: Any, cost: float | None) -> Reply:
    choices = getattr(answer, "choices", None)
    if not choices:
        raise LLMError(Failure.EMPTY_ANSWER, "the answer has no choice")
    message, usage = choices[0].message, getattr(answer, "usage", None)
    raw = [call.model_dump() if hasattr(call, "model_dump") else dict(call) for call in message.tool_calls or []]
    calls, errors, unread = read_calls(raw)
    content = "\n".join(part for part in (message.content or "", unread) if part)
    return Reply(
        message=Message(
            role="assistant",
            content=content,
            tool_calls=calls,
            reasoning=getattr(message, "reasoning_content", None) or "",
        ),
        errors=errors,
        usage=Usage(
            prompt_tokens=getattr(usage, "prompt_tokens", 0) or 0,
            completion_tokens=getattr(usage, "completion_tokens", 0) or 0,
            cost_usd=cost,
            calls=1,
        ),
        finish_reason=choices[0].finish_reason or "stop",
    )
