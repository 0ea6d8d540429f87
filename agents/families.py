"""The task families of datasets/laptop: small enough that a 135M model can learn them, and unknown to it.

Four need one call, four need two: something must be read first, or made and then used. Names, values and numbers are the *fillings*; everything else
is the same in every split. Expected values stand in the verifier's command and not in a file, so that no link to them can be planted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from agents.task import ToolCall


@dataclass(frozen=True, slots=True)
class Parts:
    """What a family decides of a task."""

    prompt: str
    check: str
    """Shell command of the verifier."""
    solution: list[ToolCall]
    files: dict[str, str] = field(default_factory=dict)
    protected: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fill:
    """Fillings of one task: endless words and numbers, the next ones not repeating until the split's pool is used up."""

    words: Iterator[str]
    numbers: Iterator[int]

    def word(self) -> str:
        return next(self.words)

    def number(self) -> int:
        return next(self.numbers)


def _bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


def _write(path: str, content: str) -> ToolCall:
    return ToolCall(name="write_file", arguments={"path": path, "content": content})


def _prints(command: str, text: str) -> str:
    return f'test "$({command})" = {shlex.quote(text)}'


def _returns(module: str, function: str, value: Any) -> str:
    # The word before the value means that code which prints at import and exits early does not pass by accident.
    return _prints(
        f"python3 -c 'import {module}; print(\"returned\", repr({module}.{function}()))'", f"returned {value}"
    )


def script(fill: Fill) -> Parts:
    name, word = fill.word(), fill.word()
    return Parts(
        f"Create {name}.py that prints {word}.",
        _prints(f"python3 {name}.py", word),
        [_write(f"{name}.py", f"print('{word}')\n")],
    )


def function(fill: Fill) -> Parts:
    name, function_name, number = fill.word(), fill.word(), fill.number()
    return Parts(
        f"Define a function {function_name} that returns {number} in {name}.py.",
        _returns(name, function_name, number),
        [_write(f"{name}.py", f"def {function_name}():\n    return {number}\n")],
    )


def directory(fill: Fill) -> Parts:
    outer, inner = fill.word(), fill.word()
    return Parts(
        f"Make the directory {outer}/{inner}.", f"test -d {outer}/{inner}", [_bash(f"mkdir -p {outer}/{inner}")]
    )


def compute(fill: Fill) -> Parts:
    source, target = f"{fill.word()}.txt", f"{fill.word()}.txt"
    lines = [fill.word() for _ in range(4)]
    if lines == sorted(lines):
        lines.reverse()  # a sorted file would pass by being copied
    return Parts(
        f"Sort the lines of {source} into {target}.",
        _prints(f"cat {target}", "\n".join(sorted(lines))),
        [_bash(f"sort {source} > {target}")],
        files={source: "".join(f"{line}\n" for line in lines)},
        protected=[source],
    )


def edit(fill: Fill) -> Parts:
    file, name, old, new = f"{fill.word()}.txt", fill.word(), fill.word(), fill.word()
    return Parts(
        f"Set tag to {new} in {file} and keep the other line.",
        _prints(f"cat {file}", f"name: {name}\ntag: {new}"),
        [_bash(f"cat {file}"), _write(file, f"name: {name}\ntag: {new}\n")],
        files={file: f"name: {name}\ntag: {old}\n"},
    )


def bugfix(fill: Fill) -> Parts:
    module, function_name, wrong, right = fill.word(), fill.word(), fill.number(), fill.number()
    return Parts(
        f"Fix {module}.py: its function must return {right}.",
        _returns(module, function_name, right),
        [_bash(f"cat {module}.py"), _write(f"{module}.py", f"def {function_name}():\n    return {right}\n")],
        files={f"{module}.py": f"def {function_name}():\n    return {wrong}\n"},
    )


def lookup(fill: Fill) -> Parts:
    source, name, word = f"{fill.word()}.txt", fill.word(), fill.word()
    return Parts(
        f"Read {source} and create {name}.py that prints its word.",
        _prints(f"python3 {name}.py", word),
        [_bash(f"cat {source}"), _write(f"{name}.py", f"print('{word}')\n")],
        files={source: f"{word}\n"},
        protected=[source],
    )


def run(fill: Fill) -> Parts:
    name, word, target = fill.word(), fill.word(), f"{fill.word()}.txt"
    return Parts(
        f"Create {name}.py that prints {word} and run it into {target}.",
        f"{_prints(f'python3 {name}.py', word)} && {_prints(f'cat {target}', word)}",
        [_write(f"{name}.py", f"print('{word}')\n"), _bash(f"python3 {name}.py > {target}")],
    )


FAMILIES: Final[dict[str, Callable[[Fill], Parts]]] = {
    family.__name__: family for family in (script, function, directory, compute, edit, bugfix, lookup, run)
}
