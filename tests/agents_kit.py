"""Small real parts for the tests of agents: an LLM that says what it is told, and tasks that the mock sandbox can grade."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.llm import LLMError, Reply
from agents.parsing import parse
from agents.task import Limits, Task, ToolCall, Verifier
from agents.trajectory import Message

HANGS = "hangs"


@dataclass
class Says:
    """Answers with the texts in turn (hermes markup included), then 'Done.' for ever; an error is raised, `HANGS` never answers."""

    turns: Sequence[str | LLMError | Reply]
    name: str = "says"
    seen: list[list[Message]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        self.seen.append(list(messages))
        self.asked.set()
        place = len(self.seen) - 1
        now = self.turns[place] if place < len(self.turns) else "Done."
        if isinstance(now, LLMError):
            raise now
        if now == HANGS:
            await asyncio.Event().wait()
        if isinstance(now, Reply):
            return now
        parsed = parse(str(now), "hermes")
        return Reply(Message(role="assistant", content=str(now), tool_calls=parsed.calls), errors=parsed.errors)


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(path: str, content: str = "x\n") -> str:
    return call("write_file", path=path, content=content)


def task(name: str = "t", path: str = "a.txt", **changes: Any) -> Task:
    """Wants `path` to exist; small enough for the mock sandbox."""
    solution = [ToolCall(name="write_file", arguments={"path": path, "content": "x\n"})]
    fields: dict[str, Any] = {
        "id": name,
        "prompt": f"Create {path}.",
        "verifier": Verifier(command=f"test -f {path}"),
        "solution": solution,
    }
    return Task(**{**fields, "limits": Limits(command_timeout_s=1.0), **changes})
