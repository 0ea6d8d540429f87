"""The trajectory record, defined once: everything that happened in one episode."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agents.task import ToolCall

SCHEMA_VERSION = 1


class StopReason(StrEnum):
    FINISHED = "finished"
    """The agent said that it is done (a turn without a tool call)."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """A turn was cut at the model's token or context limit."""
    DEADLINE = "deadline"
    """The task's own episode deadline."""
    PARSE_ERROR = "parse_error"
    """Three unparsable turns in a row: the policy's own fault, a real zero."""
    AGENT_ERROR = "agent_error"
    """The provider refused for good (bad key, empty balance, content policy)."""
    INFRA_ERROR = "infra_error"
    """Sandbox, network, provider or verifier failed after every attempt."""
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_SCORED = "not_scored"
    """Never 0: it enters no mean, no advantage, no row and no denominator."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Outcome(Record):
    verdict: Verdict
    reason: str = ""
    """Why it failed or was not scored."""
    detail: str = ""
    """The verifier's last output, bounded."""

    @property
    def reward(self) -> float | None:
        """1.0 passed, 0.0 failed, None when not scored: the verifier's part of the reward rule (agents/reward.py)."""
        return {Verdict.PASSED: 1.0, Verdict.FAILED: 0.0, Verdict.NOT_SCORED: None}[self.verdict]


class Message(Record):
    """One message exactly as sent or received. `content` of an assistant turn of a policy is its raw text, tool-call markup included."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Parsed calls of an assistant turn, in order (broken ones are not here; their error is the tool message that follows)."""
    tool_call_id: str = ""
    name: str = ""
    """Tool that a `tool` message answers."""
    reasoning: str = ""


class Usage(Record):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    """None when the price is unknown or the model is local; never 0 by default."""
    calls: int = 0


class Turn(Record):
    """What only a policy rollout has: exact tokens. `len(loss_mask) == len(token_ids)`, `len(logprobs) == sum(loss_mask)`."""

    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    loss_mask: list[int] | None = None
    finish_reason: str = ""
    seconds: float = 0.0


class Trajectory(Record):
    schema_version: int = SCHEMA_VERSION
    task_id: str
    task_digest: str
    family: str
    agent: str
    """`builtin` or `codex`."""
    model: str
    attempt: int
    """Sample index of this episode: 0, 1, … below SAMPLES_PER_TASK."""
    tries: int = 1
    """Fresh starts that it took (more than one after infrastructure failures); only the last one's messages are kept."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tool schemas exactly as offered."""
    messages: list[Message] = Field(default_factory=list)
    turns: list[Turn] = Field(default_factory=list)
    stop_reason: StopReason
    outcome: Outcome
    usage: Usage = Usage()
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase: create, setup, generate, tools, grade, total."""
    run_id: str = ""
    extra: dict[str, Any] = Field(default_factory=dict)
    """GRPO rollouts: step, group, reward parts, checkpoint."""
