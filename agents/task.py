"""The task schema, defined once: a prompt, set-up, limits, a verifier and a reference solution, with a stable id and a content digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from agents.paths import check_command, check_files, check_path, clash, within
from configs.errors import UserError

Paths = Annotated[dict[str, str], AfterValidator(check_files)]
"""Workspace-relative path → text."""

Command = Annotated[str, Field(min_length=1), AfterValidator(check_command)]


class Strict(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolCall(Strict):
    """A call of one tool. `id` pairs it with its result; the same id twice in one turn is the model's error."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str = ""


class Limits(Strict):
    max_turns: int | None = Field(default=None, ge=1, le=200)
    """Turns of the agent; None takes the profile's."""

    command_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """Deadline of one tool call, in seconds."""

    episode_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Deadline of the agent loop, in seconds."""


class Verifier(Strict):
    """Hidden checks: `files` are put into the grading sandbox after the agent's own, then `command` runs; exit 0 passes."""

    command: Command
    files: Paths = Field(default_factory=dict)
    """These overwrite whatever the agent left there."""

    timeout_s: float = Field(default=30.0, gt=0, le=3600)


class Task(Strict):
    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    family: str = "general"
    prompt: str = Field(min_length=1)
    files: Paths = Field(default_factory=dict)
    """What the workspace holds at the start."""

    setup: list[Command] = Field(default_factory=list)
    """Commands run in the fresh sandbox before the agent starts; each must exit 0."""

    protected: list[Annotated[str, AfterValidator(check_path)]] = Field(default_factory=list)
    """Paths of `files` that are restored before grading: edits to them do not count."""

    limits: Limits = Limits()
    verifier: Verifier
    solution: list[ToolCall] = Field(default_factory=list)
    """The reference solution as tool calls, one a turn. Accepted tasks have one."""

    final_answer: str = "Done."
    """What the reference solution says at the end."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for path in self.protected:
            if not any(within(name, path) for name in self.files):
                raise ValueError(f"the protected path {path!r} is not among its files, so it cannot be restored")
        if both := clash({*self.files, *self.verifier.files}):
            raise ValueError(f"{both!r} is both a file and a folder in its files and its verifier's files")
        return self

    @property
    def digest(self) -> str:
        """Sixteen hex digits over everything that changes what the task is; the id is only its name."""
        content = self.model_dump(mode="json", exclude={"id"})
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


Split = Literal["train", "validation", "heldout"]


def load_tasks(path: Path) -> list[Task]:
    """Read a JSONL file of tasks. Raises `UserError` naming file, line and key for anything that is not a task, and for a repeated id."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such task file; name one with --tasks.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}).") from None
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            task = Task.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "the line"
            said = first["msg"].removeprefix("Value error, ")
            raise UserError(f"{where}: {key}: {said}. Fix or delete the line; nothing has been run.") from None
        if task.id in seen:
            raise UserError(
                f"{where}: the id {task.id!r} is already used in line {seen[task.id]}; give each task its own."
            )
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: holds no task; each line is one JSON object with id, prompt and verifier.")
    return tasks


def refuse_overlap(train: list[Task], heldout: list[Task], *, here: str = "training", there: str = "held-out") -> None:
    """Raises `UserError` when a held-out task is also a training task, by digest, by id or by prompt; `here` and `there` name the two splits."""
    for key in ("digest", "id", "prompt"):
        shared = {getattr(t, key) for t in train} & {getattr(t, key) for t in heldout}
        if shared:
            names = sorted(t.id for t in heldout if getattr(t, key) in shared)
            raise UserError(
                f"{there} task {names[0]!r} is also in the {here} split (same {key}; {len(names)} in all): "
                "remove it from one of the two files, or the evaluation measures memory."
            )
