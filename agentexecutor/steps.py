"""The steps of the loop, one command each. Heavy imports happen inside a command, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentexecutor.options import (
    Backend,
    Concurrency,
    DataDir,
    DryRun,
    Force,
    Json,
    Llm,
    MaxTurns,
    OutputDir,
    ProfileName,
    app,
    effective,
    forced,
    show_command,
    show_result,
)


@app.command()
def collect(
    tasks: Annotated[Path | None, typer.Option("--tasks", help="JSONL of tasks; default: the profile's.")] = None,
    backend: Backend = None,
    agent: Annotated[str | None, typer.Option("--agent", help="builtin or codex.")] = None,
    llm: Llm = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Episodes of each task. Overrides SAMPLES_PER_TASK.")
    ] = None,
    concurrency: Concurrency = None,
    max_turns: MaxTurns = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Let the teacher solve tasks in sandboxes; episodes already paid for are reused."""
    from agentexecutor.console import emit, running
    from agents.task import load_tasks
    from configs.load import require_keys

    flags = {
        "collect.tasks": tasks,
        "sandboxes.backend": backend,
        "teacher.agent": agent,
        "teacher.llm": llm,
        "collect.samples_per_task": samples,
        "collect.concurrency": concurrency,
        "collect.max_turns": max_turns,
        "paths.data": data_dir,
        "paths.output": output_dir,
    }
    chosen = effective(profile, flags, say=True)
    if dry_run:
        loaded = load_tasks(chosen.collect.tasks)
        episodes = len(loaded) * chosen.collect.samples_per_task
        plan = {
            "tasks": len(loaded),
            "episodes": episodes,
            "sandboxes": 2 * episodes,
            "teacher": chosen.teacher.llm,
            "backend": chosen.sandboxes.backend,
        }
        emit(plan, as_json, "would collect: " + ", ".join(f"{k} {v}" for k, v in plan.items()))
        return
    require_keys(chosen, teacher=True, sandboxes=True)
    from agents.collect import collect as step

    with running(chosen, as_json, forced(force, "collect")) as run:
        result = step(run, chosen.collect.tasks)
        show_result(result, as_json)
        if spoiled := result.summary.get("not_scored"):
            episodes = result.summary["episodes"]
            typer.echo(f"{spoiled} of {episodes} episodes were not scored; run again to collect only those", err=True)


@app.command()
def export(
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSONL to write; default: data/agent_lora_sft/sft/train.jsonl.")
    ] = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write verified episodes as ms-swift agent rows, with a count for every reason to drop."""
    from agentexecutor.console import running
    from configs.run import Layout
    from training.export import export as step

    chosen = effective(profile, {"paths.data": data_dir, "paths.output": output_dir})
    layout = Layout(chosen)
    with running(chosen, as_json, forced(force, "export")) as run:
        show_result(step(run, layout.trajectories, chosen.evaluate.tasks, (out or layout.sft_rows).absolute()), as_json)


@app.command("sft-train")
def sft_train(
    rows: Annotated[Path | None, typer.Option("--rows", help="JSONL of `export`; default: the one under data.")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the rows. Overrides EPOCHS.")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", help="Optimizer steps.")] = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Train a LoRA on the exported rows by torchrun and `swift sft`."""
    from agentexecutor.console import running
    from configs.run import Layout
    from training import sft

    flags = {"sft.epochs": epochs, "sft.max_steps": max_steps, "paths.data": data_dir, "paths.output": output_dir}
    chosen = effective(profile, flags, say=not dry_run)
    source = (rows or Layout(chosen).sft_rows).absolute()
    if dry_run:
        from configs.run import Run

        show_command(sft.command(Run(chosen, "dry-run"), source), as_json)
        return
    with running(chosen, as_json, forced(force, "sft")) as run:
        show_result(sft.sft(run, source), as_json)


@app.command("rl-prepare")
def rl_prepare(
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="JSONL of training tasks; default: the profile's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSONL to write; default: data/agent_lora_rl/train.jsonl.")
    ] = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Write one prompt row per task for GRPO, balanced by family."""
    from agentexecutor.console import emit, running
    from agents.task import load_tasks
    from configs.run import Layout
    from training import grpo

    chosen = effective(profile, {"grpo.tasks": tasks, "paths.data": data_dir, "paths.output": output_dir})
    target = (out or Layout(chosen).rl_rows).absolute()
    if dry_run:
        rows = len(load_tasks(chosen.rl_tasks))
        emit({"rows": rows, "out": str(target)}, as_json, f"would write {rows} prompts to {target}")
        return
    with running(chosen, as_json, forced(force, "rl-prepare")) as run:
        show_result(grpo.prepare(run, chosen.rl_tasks, target), as_json)


@app.command("rl-train")
def rl_train(
    rows: Annotated[
        Path | None, typer.Option("--rows", help="JSONL of `rl-prepare`; default: the one under data.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="SFT LoRA to continue from; default: the newest one.")
    ] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the prompts. Overrides EPOCHS.")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", help="Optimizer steps.")] = None,
    backend: Backend = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Train the LoRA further by GRPO: the policy acts in sandboxes, the verifier rewards."""
    from agentexecutor.console import running
    from configs.load import require_keys
    from configs.run import Layout, Run
    from training import grpo
    from training.checkpoints import newest_adapter

    flags = {
        "grpo.epochs": epochs,
        "grpo.max_steps": max_steps,
        "sandboxes.backend": backend,
        "paths.data": data_dir,
        "paths.output": output_dir,
    }
    chosen = effective(profile, flags, say=not dry_run)
    layout = Layout(chosen)
    source = (rows or layout.rl_rows).absolute()
    if dry_run:
        show_command(
            grpo.command(Run(chosen, "dry-run"), source, adapter or layout.sft / "<newest checkpoint>"), as_json
        )
        return
    require_keys(chosen, teacher=False, sandboxes=True)
    start = adapter.absolute() if adapter else newest_adapter(layout.sft)
    with running(chosen, as_json, forced(force, "grpo")) as run:
        show_result(grpo.grpo(run, source, start), as_json)
