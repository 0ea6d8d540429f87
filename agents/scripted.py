"""Deterministic LLMs that ship with the package: for the offline demo, for `laptop`'s teacher, and for users' own tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agents.llm import Reply
from agents.task import Task, ToolCall
from agents.trajectory import Message
from configs.errors import UserError
from sandboxes.base import WORKSPACE


@dataclass(frozen=True, slots=True)
class ScriptedLLM:
    """Replays a task's reference solution, one call a turn, then says its final answer. Raises `UserError` for a task without one."""

    task: Task

    def __post_init__(self) -> None:
        if not self.task.solution:
            raise UserError(f"task {self.task.id!r} has no reference solution to replay; name a model with --llm.")

    @property
    def name(self) -> str:
        return "scripted"

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        turn = sum(message.role == "assistant" for message in messages)
        if turn >= len(self.task.solution):
            return Reply(Message(role="assistant", content=self.task.final_answer))
        call = self.task.solution[turn]
        named = call if call.id else call.model_copy(update={"id": f"call_{turn}"})
        return Reply(Message(role="assistant", tool_calls=[named]), finish_reason="tool_calls")


_PATH = re.compile(rf"{WORKSPACE}/[\w./-]*\w|[\w-][\w./-]*\.\w+")


@dataclass(frozen=True, slots=True)
class MockLLM:
    """Writes the file that the prompt names, then finishes."""

    @property
    def name(self) -> str:
        return "mock"

    async def complete(self, messages: list[Message], tools: list[dict[str, Any]], *, max_tokens: int) -> Reply:
        if any(message.role == "assistant" for message in messages):
            return Reply(Message(role="assistant", content="Done."))
        prompt = next(message.content for message in messages if message.role == "user")
        named = _PATH.search(prompt)
        if named is None:
            return Reply(Message(role="assistant", content="The prompt names no file."))
        call = ToolCall(name="write_file", arguments={"path": named.group(), "content": "print('hi')\n"}, id="call_0")
        return Reply(Message(role="assistant", tool_calls=[call]), finish_reason="tool_calls")
