"""A chat-completions server that replays reference solutions, with faults on schedule: for tests, offline demos, and users' own tests.

    async with FakeLLM(tasks, style="policy", faults={1: "429"}) as server:
        llm = PolicyLLM(server.url, "any", "hermes")

`provider` answers with structured tool calls, `policy` as `swift deploy` does (raw text, token ids, log-probabilities). Standard library only, and plain
sockets, because a cut answer must really be cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from agents.parsing import Format, render
from agents.scripted import ScriptedLLM
from agents.task import Task
from agents.trajectory import Message
from configs.errors import UserError

HANG: Final = "hang"
"""The fault that never answers."""

CUT: Final = "cut"
"""The fault that breaks the connection in the middle of the body."""

_JSON: Final = "application/json"


def _error(message: str, code: str = "") -> str:
    return json.dumps({"error": {"message": message, "type": code or "error", "code": code}})


FAULTS: Final[dict[str, tuple[int, dict[str, str], str]]] = {
    "401": (401, {}, _error("Incorrect API key provided", "invalid_api_key")),
    "402": (402, {}, _error("Insufficient Balance")),
    "404": (404, {}, _error("The model does not exist", "model_not_found")),
    "429": (429, {"Retry-After": "2"}, _error("Rate limit reached", "rate_limit_exceeded")),
    "500": (500, {}, _error("The server had an error")),
    "503": (503, {}, _error("Overloaded")),
    "html": (
        200,
        {"Content-Type": "text/html"},
        "<!DOCTYPE html><html><body>Sign in to the hotel network</body></html>",
    ),
    "empty": (
        200,
        {},
        json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "fake", "choices": []}),
    ),
    "overflow": (400, {}, _error("This model's maximum context length is 1024 tokens", "context_length_exceeded")),
    "policy": (400, {}, _error("The response was filtered by the content policy", "content_filter")),
    "400": (400, {}, _error("temperature must be below 2")),
    CUT: (200, {}, ""),
    HANG: (200, {}, ""),
}
"""Fault → status, headers and body."""


@dataclass
class FakeLLM:
    """Serves on 127.0.0.1 while the block runs. `faults[n]` happens to the n-th request, from 1; `faults[0]` to every one without its own."""

    tasks: Sequence[Task]
    style: Literal["provider", "policy"] = "provider"
    agent_template: Format = "hermes"
    faults: Mapping[int, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies received, in order."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.faults.values() if name not in FAULTS]
        if unknown:
            raise UserError(f"there is no fault {unknown[0]!r}; use one of {', '.join(FAULTS)}.")

    @property
    def url(self) -> str:
        """The base URL, with `/v1`."""
        return f"http://{self.host}:{self.port}/v1"

    async def __aenter__(self) -> Self:
        self._open: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while (body := await _request(reader)) is not None:
                self.requests.append(body)
                fault = self.faults.get(len(self.requests), self.faults.get(0))
                if fault == HANG:
                    await reader.read()  # until the client goes
                    return
                status, headers, text = FAULTS[fault] if fault else (200, {}, json.dumps(await self._answer(body)))
                if fault == CUT:
                    text = json.dumps(await self._answer(body))
                writer.write(_response(status, headers, text, cut=fault == CUT))
                await writer.drain()
                if fault == CUT:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client went away
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = next(m["content"] for m in body["messages"] if m["role"] == "user")
        task = next(task for task in self.tasks if task.prompt == prompt)
        past = [Message(role=m["role"], content=m.get("content") or "") for m in body["messages"]]
        reply = await ScriptedLLM(task).complete(past, [], max_tokens=body.get("max_tokens") or 0)
        calls = reply.message.tool_calls
        asked = json.dumps(body["messages"])
        if self.style == "policy":
            text = render(calls, self.agent_template) or reply.message.content
            ids = list(text.encode())  # a byte is a token here
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            if body.get("return_details"):
                choice |= {"token_ids": ids, "logprobs": {"content": [{"token": chr(i), "logprob": -0.5} for i in ids]}}
            details = {"prompt_token_ids": list(asked.encode())} if body.get("return_details") else {}
        else:
            message: dict[str, Any] = {"role": "assistant", "content": reply.message.content}
            if calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                    for c in calls
                ]
            choice, details, text = (
                {"message": message, "finish_reason": "tool_calls" if calls else "stop"},
                {},
                json.dumps(message),
            )
        usage = {"prompt_tokens": len(asked), "completion_tokens": len(text), "total_tokens": len(asked) + len(text)}
        base = {"id": "fake", "object": "chat.completion", "created": 1, "model": body.get("model", "fake")}
        return base | details | {"choices": [{"index": 0, **choice}], "usage": usage}


async def _request(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The JSON body of the next request on the connection; None at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    length = next(
        (int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length:")), 0
    )
    body: dict[str, Any] = json.loads(await reader.readexactly(length))
    return body


def _response(status: int, headers: Mapping[str, str], text: str, *, cut: bool) -> bytes:
    body = text.encode()
    lines = [f"HTTP/1.1 {status} Status", *(f"{k}: {v}" for k, v in ({"Content-Type": _JSON} | dict(headers)).items())]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
    return head + (body[: len(body) // 2] if cut else body)
