"""Tool calls in an assistant's text, and back: `hermes` (JSON) and `qwen3_5` (XML-like, as Qwen3.5 and Qwen3.8 write them).

Strict and total: `parse` never raises, and what is not exactly a call is an error with its place, never a guess. ms-swift's own parsers repair
and skip; a policy rewarded through those learns to write what no other server accepts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from agents.task import ToolCall

Format = Literal["hermes", "qwen3_5"]

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

MAX_CALLS: Final = 16
"""Calls read from one turn; more is an error, so that a repeating model cannot fill the context."""


@dataclass(frozen=True, slots=True)
class Parsed:
    calls: list[ToolCall]
    """In the order written; `id` is `call_<place in the turn>`."""
    errors: list[str]
    """One sentence for every broken call, in the order written."""
    text_before: str
    """What stands before the first call, without the thinking."""


class _Broken(ValueError):
    """One call cannot be read; the message is shown to the model."""


def parse(text: str, format: Format) -> Parsed:
    """Read the calls of one assistant turn. A turn without any is a final answer: no calls and no errors."""
    body = _after_thinking(text)
    read = {"hermes": _hermes, "qwen3_5": _qwen3_5}[format]
    calls: list[ToolCall] = []
    errors: list[str] = []
    first = body.find(OPEN)
    position = 0
    number = 0
    while (start := body.find(OPEN, position)) >= 0:
        if CLOSE in body[position:start]:
            errors.append(f"there is a {CLOSE} without its {OPEN} before tool call {number + 1}")
        number += 1
        if number > MAX_CALLS:
            errors.append(f"more than {MAX_CALLS} tool calls in one turn; make one call a turn")
            return Parsed(calls, errors, body[:first].strip())
        try:
            name, arguments, position = read(body, start + len(OPEN))
            calls.append(ToolCall(name=name, arguments=arguments, id=f"call_{number - 1}"))
        except _Broken as error:
            errors.append(f"tool call {number}: {error}")
            end = body.find(CLOSE, start)
            after = body.find(OPEN, start + len(OPEN))
            position = (
                len(body) if end < 0 and after < 0 else after if end < 0 or 0 <= after < end else end + len(CLOSE)
            )
    if CLOSE in body[position:]:
        errors.append(f"there is a {CLOSE} without its {OPEN}")
    return Parsed(calls, errors, (body[:first] if first >= 0 else body).strip())


def render(calls: Iterable[ToolCall], format: Format) -> str:
    """The calls as ms-swift's agent template of that name writes them. `qwen3_5` holds string arguments only."""
    blocks = []
    for call in calls:
        if format == "hermes":
            inside = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        else:
            inside = f"<function={call.name}>\n"
            inside += "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
            inside += "</function>"
        blocks.append(f"{OPEN}\n{inside}\n{CLOSE}")
    return "\n".join(blocks)


def loads(text: str) -> Any:
    """`json.loads` that raises only ValueError: no NaN, no repeated key, no endless nesting."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _after_thinking(text: str) -> str:
    """Drop a thinking block at the start; the opening tag may be in the prompt instead. An unclosed one holds no call."""
    opened, closed = text.find("<think>"), text.find("</think>")
    if closed >= 0 and not 0 <= closed < opened and (opened < 0 or not text[:opened].strip()):
        return text[closed + len("</think>") :]
    if closed < 0 and text.lstrip().startswith("<think>"):
        return ""
    return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
_SPACE: Final = re.compile(r"\s*")
_EXAMPLE: Final = 'write {"name": "...", "arguments": {...}} between the tags'


def _hermes(body: str, start: int) -> tuple[str, dict[str, Any], int]:
    begin = _SPACE.match(body, start).end()  # type: ignore[union-attr]  # `\s*` always matches
    try:
        # Decoding from here, rather than up to the closing tag, lets an argument contain the tag's own text.
        value, end = _DECODER.raw_decode(body, begin)
    except json.JSONDecodeError as error:
        raise _Broken(f"its JSON is broken at character {error.pos - begin} ({error.msg}); {_EXAMPLE}") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _Broken(f"its JSON is refused ({why}); {_EXAMPLE}") from None
    end = _closed(body, end)
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        raise _Broken(f"it must be one JSON object with the keys name and arguments; {_EXAMPLE}")
    if not isinstance(value["name"], str) or not isinstance(value["arguments"], dict):
        raise _Broken(f"name must be a string and arguments an object; {_EXAMPLE}")
    return value["name"], value["arguments"], end


_FUNCTION: Final = re.compile(r"\s*<function=([^<>\n]+)>[ \t]*\n?")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^<>\n]+)>(?:\r?\n)?(.*?)\n?</parameter>", re.DOTALL)
_END: Final = re.compile(r"\s*</function>")


def _qwen3_5(body: str, start: int) -> tuple[str, dict[str, Any], int]:
    function = _FUNCTION.match(body, start)
    if function is None:
        raise _Broken("it must begin with <function=NAME>")
    arguments: dict[str, Any] = {}
    position = function.end()
    while (parameter := _PARAMETER.match(body, position)) is not None:
        key = parameter.group(1).strip()
        if key in arguments:
            raise _Broken(f"the parameter {key!r} is there twice")
        # The template puts one line break on each side of a value; the others are the value's own.
        arguments[key] = parameter.group(2)
        position = parameter.end()
    end = _END.match(body, position)
    if end is None:
        raise _Broken("each <parameter=KEY> must be closed by </parameter>, and the call by </function>")
    return function.group(1).strip(), arguments, _closed(body, end.end())


def _closed(body: str, position: int) -> int:
    position = _SPACE.match(body, position).end()  # type: ignore[union-attr]
    if not body.startswith(CLOSE, position):
        raise _Broken(f"it must end with {CLOSE} right after the call")
    return position + len(CLOSE)
