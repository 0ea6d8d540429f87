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
    index: int
    """Place of the task within its family, for families with variants."""

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
        f"Create {name}.py with a function {function_name} that returns {number}.",
        _returns(name, function_name, number),
        [_write(f"{name}.py", f"def {function_name}():\n    return {number}\n")],
    )


def directory(fill: Fill) -> Parts:
    outer, inner = fill.word(), fill.word()
    return Parts(
        f"Create the directory {outer}/{inner}.", f"test -d {outer}/{inner}", [_bash(f"mkdir -p {outer}/{inner}")]
    )


OPERATIONS: Final[tuple[tuple[str, str, Callable[[list[str]], list[str]]], ...]] = (
    ("Sort the lines of {0} into {1}.", "sort {0} > {1}", sorted),
    ("Reverse the order of the lines of {0} into {1}.", "tac {0} > {1}", lambda lines: lines[::-1]),
)


def compute(fill: Fill) -> Parts:
    source, target = f"{fill.word()}.txt", f"{fill.word()}.txt"
    lines = [fill.word() for _ in range(4)]
    if lines == sorted(lines):
        lines.reverse()  # a sorted file would pass by being copied
    ask, command, apply = OPERATIONS[fill.index % len(OPERATIONS)]
    return Parts(
        ask.format(source, target),
        _prints(f"cat {target}", "\n".join(apply(lines))),
        [_bash(command.format(source, target))],
        files={source: "".join(f"{line}\n" for line in lines)},
        protected=[source],
    )


def edit(fill: Fill) -> Parts:
    file, name, old, new = f"{fill.word()}.txt", fill.word(), fill.word(), fill.word()
    return Parts(
        f"Set color to {new} in {file} and keep the other line.",
        _prints(f"cat {file}", f"name: {name}\ncolor: {new}"),
        [_bash(f"cat {file}"), _write(file, f"name: {name}\ncolor: {new}\n")],
        files={file: f"name: {name}\ncolor: {old}\n"},
    )


def bugfix(fill: Fill) -> Parts:
    module, function_name, wrong, right = fill.word(), fill.word(), fill.number(), fill.number()
    return Parts(
        f"Fix {module}.py: its function must return {right}.",
        _returns(module, function_name, right),
        [_bash(f"cat {module}.py"), _write(f"{module}.py", f"def {function_name}():\n    return {right}\n")],
        files={f"{module}.py": f"def {function_name}():\n    return {wrong}\n"},
    )


def run(fill: Fill) -> Parts:
    name, word, target = fill.word(), fill.word(), f"{fill.word()}.txt"
    return Parts(
        f"Run a new {name}.py that prints {word} and save its output in {target}.",
        f"{_prints(f'python3 {name}.py', word)} && {_prints(f'cat {target}', word)}",
        [_write(f"{name}.py", f"print('{word}')\n"), _bash(f"python3 {name}.py > {target}")],
    )


def lookup(fill: Fill) -> Parts:
    source, name, word = f"{fill.word()}.txt", fill.word(), fill.word()
    return Parts(
        f"Create {name}.py that prints the word in {source}.",
        _prints(f"python3 {name}.py", word),
        [_bash(f"cat {source}"), _write(f"{name}.py", f"print('{word}')\n")],
        files={source: f"{word}\n"},
        protected=[source],
    )


FAMILIES: Final[dict[str, Callable[[Fill], Parts]]] = {
    family.__name__: family for family in (script, function, directory, compute, edit, bugfix, run, lookup)
}
