"""Chat completions on the wire: our messages to OpenAI's dictionaries, and an answer's tool calls back. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from agents.parsing import CLOSE, OPEN, loads
from agents.task import ToolCall
from agents.trajectory import Message


def to_provider(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """For a provider that gives structured tool calls.

    A call that could not be read was never a call for the provider: it stands in the assistant's text, and its error follows as a user message.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "assistant":
            sent: dict[str, Any] = {"role": "assistant", "content": message.content}
            if message.tool_calls:
                sent["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                    for c in message.tool_calls
                ]
            if message.reasoning:
                sent["reasoning_content"] = message.reasoning
            out.append(sent)
        elif message.role == "tool" and message.tool_call_id:
            out.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content})
        else:
            out.append({"role": "user" if message.role == "tool" else message.role, "content": message.content})
    return out


def to_policy(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """For `swift deploy`: the assistant's raw text as it was sampled, tool results as role tool, and never a null content (a 500 there)."""
    return [{"role": message.role, "content": message.content} for message in messages]


def read_calls(raw: Iterable[Mapping[str, Any]]) -> tuple[list[ToolCall], list[str], str]:
    """The calls of a provider's answer in order, one sentence per unreadable one, and the unreadable ones as text.

    A repeated id is an error: the provider could not tell which result belongs to which call.
    """
    calls: list[ToolCall] = []
    errors: list[str] = []
    unread: list[str] = []
    seen: set[str] = set()
    for number, item in enumerate(raw, start=1):
        function = item.get("function") or {}
        name, text = str(function.get("name") or ""), function.get("arguments")
        id = str(item.get("id") or f"call_{number - 1}")
        problem = f"the id {id!r} is already used by another call of this turn" if id in seen else None
        arguments: Any = text if isinstance(text, dict) else None
        if problem is None and arguments is None:
            try:
                arguments = loads(text or "{}")
                problem = None if isinstance(arguments, dict) else "its arguments must be a JSON object"
            except (ValueError, TypeError) as error:
                problem = f"the JSON of its arguments is broken ({error})"
        if problem is None:
            seen.add(id)
            calls.append(ToolCall(name=name, arguments=arguments, id=id))
        else:
            errors.append(f"tool call {number} ({name or 'no name'}): {problem}")
            unread.append(f"{OPEN}\n{name} {text}\n{CLOSE}")
    return calls, errors, "\n".join(unread)
