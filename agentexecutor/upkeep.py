"""Commands around the loop: tasks, looking, cleaning, checking."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentexecutor.options import Backend, Concurrency, DryRun, Json, OutputDir, ProfileName, app, effective


@app.command("validate-tasks")
def validate_tasks(
    tasks: Annotated[Path, typer.Option("--tasks", help="JSONL of tasks.")],
    backend: Backend = None,
    concurrency: Concurrency = None,
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Accept a task only when its reference solution passes and doing nothing fails."""
    from agentexecutor.console import emit, reporter
    from agents.task import load_tasks
    from agents.validate import validate_file

    chosen = effective(profile or "laptop", {"sandboxes.backend": backend, "collect.concurrency": concurrency})
    if dry_run:
        count = len(load_tasks(tasks))
        emit({"tasks": count, "episodes": 2 * count}, as_json, f"would try {count} tasks twice: solved and untouched")
        return
    with reporter(as_json) as report:
        problems, count = validate_file(chosen, tasks, report)
    text = "\n".join(f"{name}: {why}" for name, why in problems.items()) or f"all {count} tasks are valid"
    emit({"tasks": count, "problems": problems}, as_json, text)
    if problems:
        raise SystemExit(1)


@app.command("import-tasks")
def import_tasks(
    source: Annotated[Path, typer.Argument(help="JSONL in another format.")],
    out: Annotated[Path, typer.Option("--out", help="JSONL of tasks to write.")],
    form: Annotated[str, typer.Option("--format", help="humaneval, mbpp or tasks.")] = "tasks",
    as_json: Json = False,
) -> None:
    """Convert tasks of another format into ours; then check them with validate-tasks."""
    from agentexecutor.console import emit
    from agents.importers import import_tasks as convert
    from configs.files import write_jsonl

    tasks = convert(form, source)
    write_jsonl(out, [task.model_dump(mode="json", exclude_defaults=True) for task in tasks])
    emit(
        {"tasks": len(tasks), "out": str(out)},
        as_json,
        f"{len(tasks)} tasks → {out}; next: agentexecutor validate-tasks --tasks {out}",
    )


@app.command()
def view(
    path: Annotated[Path, typer.Argument(help="An episode's JSON, a JSONL of rollouts, or a trajectories.parquet.")],
    index: Annotated[int, typer.Option("--index", min=0, help="Which one of several.")] = 0,
    as_json: Json = False,
) -> None:
    """Show one trajectory: every turn, call, result, and the verdict."""
    from agentexecutor.console import emit
    from agents.view import open_trajectory, render_trajectory

    trajectory = open_trajectory(path, index)
    emit(trajectory.model_dump(mode="json"), as_json, render_trajectory(trajectory))


@app.command()
def plan(
    profile: ProfileName = None,
    memory_gb: Annotated[float, typer.Option("--memory-gb", help="Memory of one card.")] = 80.0,
    as_json: Json = False,
) -> None:
    """Memory arithmetic of a profile: does it fit, and which knob to turn."""
    from agentexecutor.console import emit
    from training.plan import plan as arithmetic
    from training.plan import render

    budget = arithmetic(effective(profile, {}), memory_gb)
    emit(budget.model_dump(), as_json, render(budget))


@app.command()
def clean(
    keep: Annotated[int, typer.Option("--keep", min=0, help="Versions and runs to keep of each kind.")] = 3,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Delete old versions and runs under output/; never data/, models/ or what is in service."""
    from agentexecutor.console import emit
    from training.clean import clean as sweep

    gone = sweep(effective(profile, {"paths.output": output_dir}), keep=keep, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    emit(
        {"deleted": [str(p) for p in gone], "dry_run": dry_run},
        as_json,
        "\n".join(f"{verb} {p}" for p in gone) or "nothing to delete",
    )


@app.command()
def doctor(profile: ProfileName = None, as_json: Json = False) -> None:
    """Check this machine for a profile, and print the fix for each failing line."""
    from agentexecutor.console import emit
    from tasks_lib.doctor import examine

    lines = examine(effective(profile, {}))
    text = "\n".join(
        f"{'ok ' if line.ok else 'BAD'} {line.what}{'' if line.ok else ' — ' + line.fix}" for line in lines
    )
    emit({"checks": [line.model_dump() for line in lines]}, as_json, text)
    if not all(line.ok for line in lines):
        raise SystemExit(1)


@app.command("patch-swift")
def patch_swift(
    revert: Annotated[bool, typer.Option("--revert", help="Put the original source back.")] = False,
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Remove ms-swift's redundant first base-weight sync in the train environment; safe to run twice."""
    from agentexecutor.console import emit
    from training import patch_swift as module

    python = effective(profile or "laptop", {}).paths.train_python
    text = module.run(python, revert=revert, dry_run=dry_run)
    emit({"result": text}, as_json, text)
