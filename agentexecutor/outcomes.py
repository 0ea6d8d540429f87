"""The steps that show what was learned: evaluate, infer and the demo bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentexecutor.options import (
    Adapter,
    Backend,
    DataDir,
    DryRun,
    Force,
    Json,
    OutputDir,
    ProfileName,
    app,
    effective,
    forced,
    show_command,
    show_result,
)


@app.command()
def evaluate(
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="JSONL of held-out tasks; default: the profile's.")
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="NAME=FOLDER, repeatable; default: the newest SFT and GRPO LoRA."),
    ] = None,
    backend: Backend = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Real episodes of base, SFT and GRPO on held-out tasks; report with intervals and paired differences."""
    from agentexecutor.console import running
    from configs.errors import UserError
    from configs.load import require_keys
    from configs.run import Layout, Run
    from training.checkpoints import newest_adapter
    from training.serve import command

    flags = {"evaluate.tasks": tasks, "sandboxes.backend": backend, "paths.data": data_dir, "paths.output": output_dir}
    chosen = effective(profile, flags, say=not dry_run)
    layout = Layout(chosen)
    named: dict[str, Path] = {}
    for item in adapters or []:
        name, _, folder = item.partition("=")
        if not name or not folder:
            raise UserError(f"--adapter {item!r}: write NAME=FOLDER, for example sft=output/…/checkpoint-12.")
        named[name] = Path(folder).absolute()
    if dry_run:
        show_command(
            command(
                Run(chosen, "dry-run"),
                named or {n: p / "<newest checkpoint>" for n, p in (("sft", layout.sft), ("grpo", layout.grpo))},
                0,
            ),
            as_json,
        )
        return
    require_keys(chosen, teacher=False, sandboxes=True)
    if not named:
        named = {
            name: newest_adapter(folder)
            for name, folder in (("sft", layout.sft), ("grpo", layout.grpo))
            if folder.is_dir()
        }
    from training.evaluate import evaluate as step

    with running(chosen, as_json, forced(force, "evaluate")) as run:
        result = step(run, chosen.evaluate.tasks, named)
        show_result(result, as_json)
        if not as_json:
            typer.echo(result.outputs["markdown"].read_text())


@app.command()
def infer(
    query: Annotated[str | None, typer.Option("--query", help="One question.")] = None,
    queries: Annotated[
        Path | None, typer.Option("--queries", help="JSONL of rows with `messages`, instead of one question.")
    ] = None,
    adapter: Adapter = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Ask the base model and the newest LoRA (GRPO's, else SFT's) a question."""
    from agentexecutor.console import running
    from configs.files import read_jsonl
    from configs.run import Layout, Run
    from training import infer as module
    from training.checkpoints import newest_adapter

    chosen = effective(profile, {"infer.query": query, "paths.output": output_dir}, say=not dry_run)
    layout = Layout(chosen)
    if dry_run:
        shown = adapter or layout.grpo / "<newest checkpoint>"
        show_command(module.command(Run(chosen, "dry-run"), {"lora": shown}, chosen.infer.query, queries), as_json)
        return
    name = "grpo" if adapter is None and layout.grpo.is_dir() else "sft" if adapter is None else "lora"
    start = adapter.absolute() if adapter else newest_adapter(layout.grpo if layout.grpo.is_dir() else layout.sft)
    with running(chosen, as_json, forced(force, "infer")) as run:
        result = module.infer(run, {name: start}, chosen.infer.query, queries.absolute() if queries else None)
        show_result(result, as_json)
        if not as_json:
            for row in read_jsonl(result.outputs["inference"]):
                typer.echo(f"[{row['policy']}] {row['query']} → {row['response']}")


@app.command("create-demo")
def create_demo(
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the bundle; default: datasets/demo.")] = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Refresh the demo bundle from the newest results; written only when its content changes."""
    from agentexecutor.console import emit, running
    from training.demo import refresh

    chosen = effective(profile, {"paths.data": data_dir, "paths.output": output_dir})
    folder = (out or chosen.paths.demo).absolute()
    if dry_run:
        emit({"out": str(folder)}, as_json, f"would refresh {folder}")
        return
    with running(chosen, as_json) as run:
        show_result(refresh(run, folder), as_json)
