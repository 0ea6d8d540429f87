"""What a flow is asked with: a profile by name, typed overrides, paths. Never a secret: those stay in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agents.task import load_tasks, refuse_overlap
from configs.files import exclusive
from configs.load import load_profile, require_keys
from configs.manifest import Step
from configs.profile import Profile
from configs.run import Layout, Progress, Run, new_run, silent

KEYS: Final[dict[str, str]] = {
    "samples_per_task": "collect.samples_per_task",
    "concurrency": "collect.concurrency",
    "max_turns": "collect.max_turns",
    "llm": "teacher.llm",
    "backend": "sandboxes.backend",
    "seed": "seed",
    "sft_steps": "sft.max_steps",
    "grpo_steps": "grpo.max_steps",
    "tasks": "collect.tasks",
    "heldout": "evaluate.tasks",
    "data": "paths.data",
    "models": "paths.models",
    "output": "paths.output",
}
"""Override → the profile key that it sets."""


class Overrides(BaseModel):
    """Values laid over the profile; empty ones leave it as it is. Anything else belongs in a profile file."""

    model_config = ConfigDict(extra="forbid")

    epochs: float | None = Field(default=None, gt=0, description="Passes of SFT and of GRPO (EPOCHS).")
    samples_per_task: int | None = Field(default=None, ge=1, description="Episodes of each task.")
    concurrency: int | None = Field(default=None, ge=1, description="Episodes at once.")
    max_turns: int | None = Field(default=None, ge=1, description="Turns of a collected episode.")
    llm: str | None = Field(
        default=None,
        description="Teacher: scripted, mock, or a litellm model name. Its key stays in the worker's environment.",
    )
    backend: Literal["local", "e2b", "mock"] | None = Field(default=None, description="Where commands run.")
    seed: int | None = None
    sft_steps: int | None = Field(default=None, ge=1, description="Optimizer steps of SFT, instead of epochs.")
    grpo_steps: int | None = Field(default=None, ge=1, description="Optimizer steps of GRPO, instead of epochs.")
    tasks: Path | None = Field(default=None, description="JSONL of training tasks.")
    heldout: Path | None = Field(default=None, description="JSONL of held-out tasks.")
    data: Path | None = Field(default=None, description="Folder of episodes and rows.")
    models: Path | None = Field(default=None, description="Folder of base models.")
    output: Path | None = Field(default=None, description="Folder of runtime artifacts.")

    def flags(self) -> dict[str, Any]:
        """Dotted profile keys and values, as `load_profile` takes them."""
        given = self.model_dump(mode="json", exclude={"epochs"}, exclude_none=True)
        return {KEYS[name]: value for name, value in given.items()}

    def environ(self) -> dict[str, str]:
        """Our environment, with `epochs` in its variable: the one rule for what epochs replace lives there."""
        return {**os.environ, **({"EPOCHS": str(self.epochs)} if self.epochs is not None else {})}


listener: ContextVar[Callable[[Progress], None]] = ContextVar("listener", default=silent)
"""Who else hears of progress, beside Prefect: the command line that runs a flow in its own process."""


@contextmanager
def opened(
    profile: str | None,
    overrides: Overrides,
    joined: Path | None,
    force: Iterable[Step] = (),
    *,
    teacher: bool = False,
    sandboxes: bool = False,
) -> Iterator[Run]:
    """The run of a flow.

    With `joined`, the folder of a run under way: its stored profile as it stands, whatever this process's environment says, under the lock that its
    owner holds. Otherwise a new run, holding `output/`: two runs never mix, the second one is refused by name. Raises `UserError`.
    """
    forced = frozenset(force)
    if joined is not None:
        chosen = load_profile(joined / "profile.yaml", environ={})
        require_keys(chosen, teacher=teacher, sandboxes=sandboxes)
        yield Run(chosen, joined.name, listener.get(), forced)
        return
    chosen = load_profile(profile or None, flags=overrides.flags(), environ=overrides.environ())
    require_keys(chosen, teacher=teacher, sandboxes=sandboxes)
    layout = Layout(chosen)
    with exclusive(layout.lock, f"{layout.output} (its lock {layout.lock.name})"):
        yield new_run(chosen, report=listener.get(), force=forced)


def check_splits(profile: Profile) -> None:
    """Refuse broken task files and a task that is in two of the splits, before anything is paid for. Raises `UserError`."""
    from training.validation import refuse_known, validation_tasks

    heldout = load_tasks(profile.evaluate.tasks)
    for trained in profile.trained_tasks:
        refuse_overlap(load_tasks(trained), heldout)
    refuse_known(profile, validation_tasks(profile))


def run_name() -> str:
    """Name of a flow run that people can scan: `sft smoke-20261130-…` for a part of a run, `pipeline laptop` for one of its own."""
    from prefect.runtime import flow_run

    given: dict[str, Any] = flow_run.parameters
    joined = given.get("joined")
    what = Path(joined).name if joined else given.get("profile") or "by hardware"
    return f"{flow_run.flow_name} {what}"
