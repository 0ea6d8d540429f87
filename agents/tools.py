"""The tools an agent may call: schema, arguments and execution of each, in one table.

The schemas are short on purpose: they are part of every prompt, and a 135M model reads them on a laptop (121 tokens for `bash` and `write_file`).
A result always starts with `exit_code: N`, so that success looks the same for every tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from agents.task import Limits, ToolCall
from configs.errors import UserError
from sandboxes.base import FileRefused, Sandbox, SandboxTimeout

MAX_RESULT_CHARS: Final = 2000
"""Longest tool result shown to a model, in characters (about 600 tokens); the middle of a longer one is left out."""


def call_deadline(command_s: float) -> float:
    """Seconds after which a call is given up as the infrastructure's failure: the command's own deadline, and half of it and 5 s for the backend."""
    return 1.5 * command_s + 5.0


class Arguments(BaseModel):
    """Arguments of one tool: exactly these keys, with exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Bash(Arguments):
    command: str


class WriteFile(Arguments):
    path: str
    content: str


class ReadFile(Arguments):
    path: str


class EditFile(Arguments):
    path: str
    old: str
    new: str


Execute = Callable[[Sandbox, Any, float], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Tool:
    description: str
    arguments: type[Arguments]
    execute: Execute
    """`(box, arguments, timeout_s)` → result text, unbounded. Raises `FileRefused` and `FileNotFoundError` for the agent's own mistakes."""


async def _bash(box: Sandbox, args: Bash, timeout_s: float) -> str:
    done = await box.run(args.command, timeout_s=timeout_s)
    output = done.stdout + done.stderr
    notes = f"\n[stopped after {timeout_s:g} s]" if done.timed_out else ""
    if done.dropped_bytes:
        notes += f"\n[{done.dropped_bytes} bytes of output dropped]"
    return _result(done.exit_code, _bounded(output.rstrip("\n")) + notes)


async def _write_file(box: Sandbox, args: WriteFile, timeout_s: float) -> str:
    await box.write_file(args.path, args.content.encode())
    return _result(0)


async def _read_file(box: Sandbox, args: ReadFile, timeout_s: float) -> str:
    return _result(0, _bounded((await box.read_file(args.path)).decode(errors="replace").rstrip("\n")))


async def _edit_file(box: Sandbox, args: EditFile, timeout_s: float) -> str:
    try:
        text = (await box.read_file(args.path)).decode()
    except UnicodeDecodeError:
        raise FileRefused(f"{args.path} is not UTF-8 text; edit it by a command") from None
    found = text.count(args.old) if args.old else 0
    if found != 1:
        raise FileRefused(f"`old` occurs {found} times in {args.path}; it must occur exactly once")
    await box.write_file(args.path, text.replace(args.old, args.new).encode())
    return _result(0)


TOOLS: Final[dict[str, Tool]] = {
    "bash": Tool("Run a shell command", Bash, _bash),
    "write_file": Tool("Write a file", WriteFile, _write_file),
    "read_file": Tool("Read a file", ReadFile, _read_file),
    "edit_file": Tool("Replace text that occurs once in a file", EditFile, _edit_file),
}


def schemas(names: Iterable[str]) -> list[dict[str, Any]]:
    """The tools in OpenAI's format, in the order given. Raises `UserError` for a tool that does not exist."""
    found = []
    for name in names:
        tool = TOOLS.get(name)
        if tool is None:
            raise UserError(f"there is no tool {name!r}; collect.tools may name {', '.join(TOOLS)}.")
        keys = list(tool.arguments.model_fields)
        parameters = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}
        found.append(
            {"type": "function", "function": {"name": name, "description": tool.description, "parameters": parameters}}
        )
    return found


def validate(call: ToolCall, names: Sequence[str] | None = None) -> str | None:
    """What is wrong with a call, in one sentence for the model; None when it can be run. `names` are the tools offered; None is all."""
    offered = list(TOOLS) if names is None else list(names)
    tool = TOOLS.get(call.name) if call.name in offered else None
    if tool is None:
        return f"there is no tool {call.name!r}; the tools are {', '.join(offered)}"
    try:
        tool.arguments.model_validate(call.arguments)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        keys = ", ".join(tool.arguments.model_fields)
        kinds = {"missing": f"argument {key!r} is missing", "extra_forbidden": f"there is no argument {key!r}"}
        what = kinds.get(first["type"], f"argument {key!r} must be a string, not {type(first['input']).__name__}")
        return f"{call.name}: {what}; the arguments are {keys}"
    for key, value in call.arguments.items():
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{call.name}: argument {key!r} is not valid Unicode text"
        if key in ("command", "path") and ("\0" in value or not value.strip()):
            return f"{call.name}: argument {key!r} is empty or holds a zero byte"
    return None


async def run_call(box: Sandbox, call: ToolCall, limits: Limits) -> str:
    """Run a validated call and return what the model is shown.

    The agent's own mistakes become text. Raises `SandboxError` when the infrastructure failed, also when the backend does not answer in time.
    """
    tool = TOOLS[call.name]
    arguments = tool.arguments.model_validate(call.arguments)
    deadline = call_deadline(limits.command_timeout_s)
    try:
        async with asyncio.timeout(deadline) as clock:
            return await tool.execute(box, arguments, limits.command_timeout_s)
    except FileNotFoundError:
        return error_text(f"{call.arguments['path']}: there is no such file")
    except FileRefused as error:
        return error_text(str(error))
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise SandboxTimeout(f"sandbox {box.id} did not answer a {call.name} call within {deadline:g} s") from error


def error_text(sentence: str) -> str:
    """A mistake of the agent, as a tool result."""
    return _result(1, f"error: {sentence}")


def _result(exit_code: int, output: str = "") -> str:
    return f"exit_code: {exit_code}\n{output}".rstrip("\n")


def _bounded(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    half = MAX_RESULT_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
