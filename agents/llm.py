"""What an agent talks to: one protocol, one reply, and the vocabulary of its failures as a table.

A *policy* is a model being trained, reached at its URL (agents/policy.py); a *provider* is a paid API (agents/providers.py). Both fail in the
same words, and `POLICY` says for each what may be retried, what stops a whole collection, and whose fault it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

from agents.task import Task
from agents.trajectory import Message, StopReason, Turn, Usage


class Failure(StrEnum):
    BAD_KEY = "bad_key"
    """401, 403: the key is missing, wrong or not allowed."""
    NO_BALANCE = "no_balance"
    """402: the account is empty."""
    UNKNOWN_MODEL = "unknown_model"
    """404: there is no such model or endpoint."""
    RATE_LIMITED = "rate_limited"
    """429, perhaps with Retry-After."""
    SERVER_ERROR = "server_error"
    """5xx."""
    NOT_AN_ANSWER = "not_an_answer"
    """200 with HTML, or anything else that is no chat completion: a proxy's page, as a rule."""
    EMPTY_ANSWER = "empty_answer"
    """A chat completion without a choice."""
    CUT_ANSWER = "cut_answer"
    """The connection broke in the middle of the answer."""
    NO_CONNECTION = "no_connection"
    """Nothing listens there, or the name does not resolve."""
    TIMEOUT = "timeout"
    """No answer before the call's deadline."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation is longer than the model's context."""
    CONTENT_POLICY = "content_policy"
    """The provider refused the content."""
    BAD_REQUEST = "bad_request"
    """Any other 4xx: the request itself is wrong."""


@dataclass(frozen=True, slots=True)
class Policy:
    retry: bool
    """Whether the same call may be sent again."""
    fatal: bool
    """Whether every further episode would fail as well: the whole collection stops at once."""
    stop: StopReason
    """How an episode ends that meets this for good. Only `max_tokens` is the model's own fault and scored."""


_AGAIN: Final = Policy(retry=True, fatal=False, stop=StopReason.INFRA_ERROR)
_FATAL: Final = Policy(retry=False, fatal=True, stop=StopReason.AGENT_ERROR)
_REFUSED: Final = Policy(retry=False, fatal=False, stop=StopReason.AGENT_ERROR)

POLICY: Final[dict[Failure, Policy]] = {
    Failure.BAD_KEY: _FATAL,
    Failure.NO_BALANCE: _FATAL,
    Failure.UNKNOWN_MODEL: _FATAL,
    Failure.RATE_LIMITED: _AGAIN,
    Failure.SERVER_ERROR: _AGAIN,
    Failure.NOT_AN_ANSWER: _AGAIN,
    Failure.EMPTY_ANSWER: _AGAIN,
    Failure.CUT_ANSWER: _AGAIN,
    Failure.NO_CONNECTION: _AGAIN,
    Failure.TIMEOUT: _AGAIN,
    Failure.CONTEXT_OVERFLOW: Policy(retry=False, fatal=False, stop=StopReason.MAX_TOKENS),
    Failure.CONTENT_POLICY: _REFUSED,
    Failure.BAD_REQUEST: _REFUSED,
}


class LLMError(RuntimeError):
    """One call failed. `reason` says how, `retry_after_s` how long the provider asked to wait (None: it did not say)."""

    def __init__(self, reason: Failure, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason, message, retry_after_s)
        self.reason, self.message, self.retry_after_s = reason, message, retry_after_s

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def policy(self) -> Policy:
        return POLICY[self.reason]

    @property
    def retryable(self) -> bool:
        return self.policy.retry


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant turn."""

    message: Message
    errors: list[str] = field(default_factory=list)
    """One precise sentence for every call that could not be read; such a turn runs nothing."""
    usage: Usage = field(default_factory=Usage)
    turn: Turn | None = None
    """Exact tokens, from a policy only."""
    finish_reason: str = "stop"
    """`length` when the turn was cut."""


@runtime_checkable
class LLM(Protocol):
    """Answers a conversation. Raises `LLMError` and nothing else but cancellation."""

    @property
    def name(self) -> str: ...

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply: ...


MakeLLM = Callable[[Task], LLM]
"""The LLM of one try at a task. Paid providers and policies return one shared object; the scripted one depends on the task."""

_STATUS: Final = {
    401: Failure.BAD_KEY,
    402: Failure.NO_BALANCE,
    403: Failure.BAD_KEY,
    404: Failure.UNKNOWN_MODEL,
    408: Failure.TIMEOUT,
    413: Failure.CONTEXT_OVERFLOW,
    429: Failure.RATE_LIMITED,
}

_SAYS: Final = (
    ("context_length", Failure.CONTEXT_OVERFLOW),
    ("context length", Failure.CONTEXT_OVERFLOW),
    ("context window", Failure.CONTEXT_OVERFLOW),
    ("leaves no room for generation", Failure.CONTEXT_OVERFLOW),  # ms-swift's own words
    ("maximum model length", Failure.CONTEXT_OVERFLOW),
    ("content policy", Failure.CONTENT_POLICY),
    ("content_filter", Failure.CONTENT_POLICY),
    ("insufficient balance", Failure.NO_BALANCE),
    ("insufficient_quota", Failure.NO_BALANCE),  # OpenAI sends it as a 429 that no waiting heals
)
"""What a body says where the status alone does not tell."""


def from_status(status: int, body: str, headers: Mapping[str, str] | None = None) -> LLMError:
    """The failure that an HTTP status of 400 or more means. `headers` must look up names without regard to case, or be in lower case."""
    said = body.lower()
    reason = next((failure for words, failure in _SAYS if words in said and (status < 500)), None)
    reason = reason or _STATUS.get(status) or (Failure.SERVER_ERROR if status >= 500 else Failure.BAD_REQUEST)
    return LLMError(reason, f"HTTP {status}: {shorten(body)}", retry_after((headers or {}).get("retry-after")))


def retry_after(value: str | None) -> float | None:
    """Seconds in a Retry-After header: a number or an HTTP date; None when it is neither."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def shorten(text: str, limit: int = 300) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"
