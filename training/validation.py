"""The supervisor's side of validation in GRPO: which tasks, which checkpoint is the result, and what is told about the probes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agents.task import Task, load_tasks, refuse_overlap
from configs.errors import UserError
from configs.files import digest_json, read_jsonl, write_jsonl
from configs.profile import Profile
from training.collapse import collapsed
from training.probe import PROBES, best
from training.rollout import ROLLOUTS

ROWS: Final = "validation.jsonl"
"""The prompts as they were given to the trainer, beside the checkpoints."""
START: Final = "start"
"""The adapter that training began with, where no checkpoint is better. No `checkpoint-0`: it holds nothing to go on training from."""
STATE: Final = (
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "global_step*",
    "trainer_state.json",
    "training_args.bin",
    "latest",
    "zero_to_fp32.py",
)
"""What a checkpoint holds for going on training, which is no part of an adapter."""


def validation_tasks(profile: Profile) -> list[Task]:
    """The tasks of a probe; none where the profile names no file."""
    return load_tasks(profile.grpo.validation)[: profile.grpo.probe_tasks] if profile.grpo.validation else []


def refuse_known(profile: Profile, tasks: Sequence[Task], trained: Sequence[Task] = ()) -> None:
    """Raises `UserError` for a validation task that is trained on (among `trained`, too) or held out."""
    splits = [(list(trained), "training")]
    splits += [
        (load_tasks(file), name)
        for file, name in (
            *((file, "training") for file in profile.trained_tasks),
            (profile.evaluate.tasks, "held-out"),
        )
        if tasks and file.is_file()
    ]
    for split, name in splits:
        refuse_overlap(split, list(tasks), here=name, there="validation")


def inputs(profile: Profile, tasks: Sequence[Task], rows: Path) -> dict[str, str]:
    """What decides the choice of a checkpoint, by digest; empty without tasks. Raises `UserError` as `refuse_known` does, also for tasks of `rows`."""
    if not tasks:
        return {}
    refuse_known(profile, tasks, _trained(rows))
    how = profile.evaluate.model_dump(mode="json", include={"temperature", "max_tokens"})
    return {
        "validation": digest_json(
            [[[task.id, task.digest] for task in tasks], how, profile.collect.max_turns, profile.grpo.save_steps]
        )
    }


def _trained(rows: Path) -> list[Task]:
    try:
        return [Task.model_validate_json(row["task"]) for row in read_jsonl(rows)]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{rows}: holds rows without a task; GRPO takes those of `python -m agentexecutor rl-prepare`."
        ) from None


def probes(folder: Path) -> list[dict[str, Any]]:
    """The probes of a GRPO folder, by step."""
    file = folder / PROBES
    return read_jsonl(file) if file.is_file() else []


def forget_after(folder: Path, step: int) -> None:
    """Take probes and rollouts of later steps, which will be made again, out of their files; also a probe's rollouts that it was cut before counting."""
    for file in [folder / PROBES, *(folder / ROLLOUTS).glob("*.jsonl")]:
        if file.is_file():
            lines = file.read_text(encoding="utf-8").split("\n")
            write_jsonl(file, [row for line in lines if (row := _row(line)) is not None and _step(row) <= step])
    counted = {probe["step"] for probe in probes(folder)}
    file = folder / ROLLOUTS / PROBES
    if file.is_file():
        write_jsonl(file, [row for row in read_jsonl(file) if _step(row) in counted])


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # empty, or cut by a crash
    return row if isinstance(row, dict) else None


def _step(row: Mapping[str, Any]) -> float:
    return float(row.get("extra", row).get("step", "inf"))


def chosen(folder: Path, adapter: Path | None, last: Path) -> Path:
    """The adapter that a GRPO run results in: the checkpoint of the best probe, a whole copy of `adapter` where it began best, or else the last one.

    The base itself (`adapter` None) is no adapter: where no checkpoint beats it, the best of them is taken.
    """
    made = [probe for probe in probes(folder) if probe["step"] or adapter is not None]
    found = best(made)
    if found is None:
        return last
    if found["step"] or adapter is None:
        return folder / f"checkpoint-{found['step']}"
    cut = folder / f".{START}"
    for old in (cut, folder / START):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(adapter, cut, ignore=shutil.ignore_patterns(*STATE))
    return cut.rename(folder / START)


def summary(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Small JSON for people; empty without probes."""
    found = best(made)
    if found is None:
        return {}
    start, end = made[0]["families"], found["families"]
    return {
        "probes": {f"step {probe['step']}": _of(probe["passes"], probe["scored"]) for probe in made},
        "best_step": found["step"],
        "validation_by_family": {
            name: f"{_of(*start.get(name, (0, 0)))} → {_of(*end.get(name, (0, 0)))}" for name in sorted({*start, *end})
        },
        "validation_seconds": round(sum(probe["seconds"] for probe in made), 1),
        **({"collapsed": reason} if (reason := collapsed(made)) else {}),
    }


def _of(passes: int, scored: int) -> str:
    return f"{passes} of {scored}"
