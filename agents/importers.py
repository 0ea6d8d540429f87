"""Tasks from other formats, by a table of fields. What is imported must still pass `validate-tasks`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from agents.task import Task, ToolCall, Verifier, load_tasks
from configs.errors import UserError
from configs.files import read_jsonl

ISOLATED: Final = Path(__file__).with_name("isolated.py")
"""Runs the checks and the agent's code in two processes; its text goes into every imported task."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Where a format keeps what a task needs."""

    id: str
    prompt: str
    solution: str
    needs: tuple[str, ...]
    """Fields that every record must have."""
    checks: Callable[[Mapping[str, Any]], list[str]]
    """The hidden tests of a record, each a script."""
    code: Callable[[Mapping[str, Any]], str]
    """The whole text of the solution's file."""
    graded: Callable[[Mapping[str, Any]], list[str]]
    """The names that the tests take from the agent's code; every other one is the reference's own."""
    asks: str
    """The prompt, from the record's own text."""


def _mbpp_checks(row: Mapping[str, Any]) -> list[str]:
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests:
        raise ValueError("test_list must be a list of assertions")
    return [str(row.get("test_setup_code") or ""), *map(str, tests)]


def _mbpp_graded(row: Mapping[str, Any]) -> list[str]:
    """What the reference defines and the tests name."""
    try:
        defined = [
            node.name
            for node in ast.parse(str(row["code"])).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        used = {
            node.id for test in _mbpp_checks(row) for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)
        }
    except SyntaxError as error:
        raise ValueError(f"code or test_list is not Python ({error.msg})") from None
    graded = [name for name in defined if name in used]
    if not graded:
        raise ValueError("test_list names nothing that code defines")
    return graded


FORMATS: Final[dict[str, Fields]] = {
    "humaneval": Fields(
        id="task_id",
        prompt="prompt",
        solution="canonical_solution",
        needs=("task_id", "prompt", "canonical_solution", "test", "entry_point"),
        checks=lambda row: [f"{row['test']}\ncheck({row['entry_point']})\n"],
        code=lambda row: f"{row['prompt']}{row['canonical_solution']}",
        graded=lambda row: [str(row["entry_point"])],
        asks="Write solution.py that completes this code:\n\n{0}",
    ),
    "mbpp": Fields(
        id="task_id",
        prompt="text",
        solution="code",
        needs=("task_id", "text", "code", "test_list"),
        checks=_mbpp_checks,
        code=lambda row: f"{row['code']}\n",
        graded=_mbpp_graded,
        asks="{0} Write it into solution.py.",
    ),
}
"""Format → its fields. `tasks` is our own and needs no mapping."""


def import_tasks(form: str, source: Path) -> list[Task]:
    """Convert a JSONL file. Raises `UserError` naming the format, or file, line and field."""
    if form == "tasks":
        return load_tasks(source)
    fields = FORMATS.get(form)
    if fields is None:
        raise UserError(f"there is no format {form!r}; use one of {', '.join([*FORMATS, 'tasks'])}.")
    tasks: list[Task] = []
    for number, row in enumerate(read_jsonl(source), start=1):
        where = f"{source}, record {number}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: a record is one JSON object with {', '.join(fields.needs)}.")
        missing = [name for name in fields.needs if row.get(name) in (None, "")]
        if missing:
            raise UserError(f"{where}: {missing[0]} is missing; a {form} record has {', '.join(fields.needs)}.")
        try:
            tasks.append(_task(form, fields, row))
        except (ValidationError, ValueError) as error:
            raise UserError(f"{where}: {str(error).splitlines()[0]}.") from None
    repeated = [task.id for place, task in enumerate(tasks) if task.id in {earlier.id for earlier in tasks[:place]}]
    if repeated or not tasks:
        raise UserError(
            f"{source}: the id {repeated[0]!r} is there twice." if repeated else f"{source}: holds no record."
        )
    return tasks


def _task(form: str, fields: Fields, row: Mapping[str, Any]) -> Task:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(row[fields.id])).strip("-")
    if form not in name.lower():
        name = f"{form}-{name}"
    given = {"reference": fields.code(row), "names": fields.graded(row), "tests": fields.checks(row)}
    checks = f"source = {ISOLATED.read_text(encoding='utf-8')!r}\nexec(source)\njudge(source, __file__, **{given!r})\n"
    return Task(
        id=name,
        family=form,
        prompt=fields.asks.format(str(row[fields.prompt]).strip("\n")),
        verifier=Verifier(
            command="exec python3 -I hidden_checks.py",  # no shell is left above it that graded code could reach
            files={"hidden_checks.py": checks},
        ),
        solution=[ToolCall(name="write_file", arguments={"path": "solution.py", "content": fields.code(row)})],
    )
