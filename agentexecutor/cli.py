"""Every subcommand. Heavy imports happen inside the command that needs them, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from configs.manifest import StepResult
    from configs.profile import Profile
    from training.launch import Command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train coding agents on real sandbox execution: collect → export → sft → grpo → evaluate → infer → demo.",
)

ProfileName = Annotated[str | None, typer.Option("--profile", help="Shipped profile or YAML file; default: by the NVIDIA GPUs of this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines; progress goes to stderr as JSON lines.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Run although an unchanged result is there.")]
Backend = Annotated[str | None, typer.Option("--backend", help="Where commands run: local, e2b or mock.")]
Llm = Annotated[str | None, typer.Option("--llm", help="Teacher: scripted, mock, or a litellm model name. Overrides LLM_MODEL.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Episodes at once. Overrides CONCURRENCY.")]
MaxTurns = Annotated[int | None, typer.Option("--max-turns", help="Turns of an episode. Overrides MAX_TURNS.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of episodes and rows; default: data.")]
OutputDir = Annotated[Path | None, typer.Option("--output-dir", help="Folder of runtime artifacts; default: output.")]
Adapter = Annotated[Path | None, typer.Option("--adapter", help="LoRA checkpoint folder; default: the newest one.")]


def _profile(name: str | None, flags: dict[str, Any], *, say: bool = False) -> Profile:
    """The effective profile: paths given on the command line are taken from the current folder, those of a profile from the checkout."""
    from configs.load import choose, gpu_count, load_profile

    if name is None:
        gpus = gpu_count()
        name = choose(gpus)
        if say:
            typer.echo(f"profile {name}, because this machine has {gpus or 'no'} NVIDIA GPU{'' if gpus == 1 else 's'}", err=True)
    absolute = {key: str(value.absolute()) if isinstance(value, Path) else value for key, value in flags.items()}
    return load_profile(name, flags=absolute)


def _dry(command: Command, as_json: bool) -> None:
    from agentexecutor.console import emit
    from training.launch import masked, render

    emit({"argv": command.argv, "env": masked(command.env)}, as_json, render(command))


def _finish(result: StepResult, as_json: bool) -> None:
    from agentexecutor.console import show

    show(result, as_json)


@app.command()
def run(
    prompt: Annotated[str, typer.Option("--prompt", help="What the agent shall do.")],
    backend: Backend = None,
    llm: Llm = None,
    max_turns: MaxTurns = None,
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Let the agent do one prompt in a fresh sandbox, and show every turn and the files it leaves."""
    from agentexecutor.console import emit
    from agents.trial import run_prompt
    from agents.view import render_trajectory

    chosen = _profile(profile, {"sandboxes.backend": backend, "teacher.llm": llm, "collect.max_turns": max_turns})
    if dry_run:
        plan = {"prompt": prompt, "backend": chosen.sandboxes.backend, "llm": chosen.teacher.llm, "max_turns": chosen.collect.max_turns}
        return emit(plan, as_json, "would run one episode: " + ", ".join(f"{k} {v!r}" for k, v in plan.items()))
    trajectory, files = run_prompt(chosen, prompt)
    emit({"trajectory": trajectory.model_dump(mode="json"), "files": files}, as_json, render_trajectory(trajectory, files))
    if trajectory.stop_reason in ("infra_error", "agent_error"):
        raise SystemExit(1)


@app.command()
def collect(
    tasks: Annotated[Path | None, typer.Option("--tasks", help="JSONL of tasks; default: the profile's.")] = None,
    backend: Backend = None,
    agent: Annotated[str | None, typer.Option("--agent", help="builtin or codex.")] = None,
    llm: Llm = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Episodes of each task. Overrides SAMPLES_PER_TASK.")] = None,
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
    chosen = _profile(profile, flags, say=True)
    if dry_run:
        loaded = load_tasks(chosen.collect.tasks)
        episodes = len(loaded) * chosen.collect.samples_per_task
        plan = {"tasks": len(loaded), "episodes": episodes, "sandboxes": 2 * episodes, "teacher": chosen.teacher.llm, "backend": chosen.sandboxes.backend}
        return emit(plan, as_json, "would collect: " + ", ".join(f"{k} {v}" for k, v in plan.items()))
    require_keys(chosen, teacher=True, sandboxes=True)
    from agents.collect import collect as step

    with running(chosen, as_json, _forced(force, "collect")) as run:
        _finish(step(run, chosen.collect.tasks), as_json)


@app.command()
def export(
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSONL to write; default: data/agent_lora_sft/sft/train.jsonl.")] = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write verified episodes as ms-swift agent rows, with a count for every reason to drop."""
    from agentexecutor.console import running
    from configs.run import Layout
    from training.export import export as step

    chosen = _profile(profile, {"paths.data": data_dir, "paths.output": output_dir})
    layout = Layout(chosen)
    with running(chosen, as_json, _forced(force, "export")) as run:
        _finish(step(run, layout.trajectories, chosen.evaluate.tasks, (out or layout.sft_rows).absolute()), as_json)


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
    chosen = _profile(profile, flags, say=not dry_run)
    source = (rows or Layout(chosen).sft_rows).absolute()
    if dry_run:
        from configs.run import Run

        return _dry(sft.command(Run(chosen, "dry-run"), source), as_json)
    with running(chosen, as_json, _forced(force, "sft")) as run:
        _finish(sft.sft(run, source), as_json)


@app.command("rl-prepare")
def rl_prepare(
    tasks: Annotated[Path | None, typer.Option("--tasks", help="JSONL of training tasks; default: the profile's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSONL to write; default: data/agent_lora_rl/train.jsonl.")] = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write one prompt row per task for GRPO, balanced by family."""
    from agentexecutor.console import running
    from configs.run import Layout
    from training import grpo

    chosen = _profile(profile, {"collect.tasks": tasks, "paths.data": data_dir, "paths.output": output_dir})
    with running(chosen, as_json, _forced(force, "rl-prepare")) as run:
        _finish(grpo.prepare(run, chosen.collect.tasks, (out or Layout(chosen).rl_rows).absolute()), as_json)


@app.command("rl-train")
def rl_train(
    rows: Annotated[Path | None, typer.Option("--rows", help="JSONL of `rl-prepare`; default: the one under data.")] = None,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="SFT LoRA to continue from; default: the newest one.")] = None,
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

    flags = {"grpo.epochs": epochs, "grpo.max_steps": max_steps, "sandboxes.backend": backend, "paths.data": data_dir, "paths.output": output_dir}
    chosen = _profile(profile, flags, say=not dry_run)
    layout = Layout(chosen)
    source = (rows or layout.rl_rows).absolute()
    if dry_run:
        return _dry(grpo.command(Run(chosen, "dry-run"), source, adapter or layout.sft / "<newest checkpoint>"), as_json)
    require_keys(chosen, teacher=False, sandboxes=True)
    start = adapter.absolute() if adapter else newest_adapter(layout.sft)
    with running(chosen, as_json, _forced(force, "grpo")) as run:
        _finish(grpo.grpo(run, source, start), as_json)


@app.command("rl-loop")
def rl_loop(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of rollout and training.")] = 3,
    patience: Annotated[int, typer.Option("--patience", min=1, help="Stop after this many rounds without a better held-out pass rate.")] = 2,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="LoRA to start from; default: the newest SFT LoRA.")] = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Repeat GRPO in rounds, each from the best adapter so far; the best one is kept."""
    from agentexecutor.console import emit, running
    from configs.load import require_keys
    from configs.run import Layout
    from training.checkpoints import newest_adapter
    from training.rounds import rounds as loop

    chosen = _profile(profile, {"paths.data": data_dir, "paths.output": output_dir}, say=not dry_run)
    if dry_run:
        plan = {"rounds": rounds, "patience": patience, "folder": str(Layout(chosen).grpo / "round-001")}
        return emit(plan, as_json, f"would run {rounds} rounds from {plan['folder']} on, and stop after {patience} without progress")
    require_keys(chosen, teacher=False, sandboxes=True)
    start = adapter.absolute() if adapter else newest_adapter(Layout(chosen).sft)
    with running(chosen, as_json) as run:
        best = loop(run, start, rounds=rounds, patience=patience)
        emit(best, as_json, f"best: round {best['round']}, held-out pass rate {best['pass_rate']:.1%}, {best['adapter']}")


@app.command()
def infer(
    query: Annotated[str | None, typer.Option("--query", help="One question.")] = None,
    queries: Annotated[Path | None, typer.Option("--queries", help="JSONL of rows with `messages`, instead of one question.")] = None,
    adapter: Adapter = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Force = False,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Ask the base model and the newest LoRA (GRPO's, else SFT's) by `swift infer`."""
    from agentexecutor.console import running
    from configs.files import read_jsonl
    from configs.run import Layout, Run
    from training import infer as module
    from training.checkpoints import newest_adapter

    chosen = _profile(profile, {"infer.query": query, "paths.output": output_dir}, say=not dry_run)
    layout = Layout(chosen)
    if dry_run:
        return _dry(module.command(Run(chosen, "dry-run"), adapter or layout.grpo / "<newest checkpoint>", Path("<queries>.jsonl")), as_json)
    name = "grpo" if adapter is None and layout.grpo.is_dir() else "sft" if adapter is None else "lora"
    start = adapter.absolute() if adapter else newest_adapter(layout.grpo if layout.grpo.is_dir() else layout.sft)
    with running(chosen, as_json, _forced(force, "infer")) as run:
        result = module.infer(run, {name: start}, chosen.infer.query, queries.absolute() if queries else None)
        _finish(result, as_json)
        if not as_json:
            for row in read_jsonl(result.outputs["inference"]):
                typer.echo(f"[{row['policy']}] {row['query']} → {row['response']}")


@app.command()
def evaluate(
    tasks: Annotated[Path | None, typer.Option("--tasks", help="JSONL of held-out tasks; default: the profile's.")] = None,
    adapters: Annotated[list[str] | None, typer.Option("--adapter", help="NAME=FOLDER, repeatable; default: the newest SFT and GRPO LoRA.")] = None,
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
    chosen = _profile(profile, flags, say=not dry_run)
    layout = Layout(chosen)
    named: dict[str, Path] = {}
    for item in adapters or []:
        name, _, folder = item.partition("=")
        if not name or not folder:
            raise UserError(f"--adapter {item!r}: write NAME=FOLDER, for example sft=output/…/checkpoint-12.")
        named[name] = Path(folder).absolute()
    if dry_run:
        return _dry(command(Run(chosen, "dry-run"), named or {n: p / "<newest checkpoint>" for n, p in (("sft", layout.sft), ("grpo", layout.grpo))}, 0), as_json)
    require_keys(chosen, teacher=False, sandboxes=True)
    if not named:
        named = {name: newest_adapter(folder) for name, folder in (("sft", layout.sft), ("grpo", layout.grpo)) if folder.is_dir()}
    from training.evaluate import evaluate as step

    with running(chosen, as_json, _forced(force, "evaluate")) as run:
        result = step(run, chosen.evaluate.tasks, named)
        _finish(result, as_json)
        if not as_json:
            typer.echo(result.outputs["markdown"].read_text())


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
    from configs.run import Layout
    from training.checkpoints import newest_output
    from training.demo import demo

    chosen = _profile(profile, {"paths.data": data_dir, "paths.output": output_dir})
    layout = Layout(chosen)
    folder = (out or chosen.paths.demo).absolute()
    if dry_run:
        return emit({"out": str(folder)}, as_json, f"would refresh {folder}")
    inference, report = newest_output(layout.infer, "inference"), newest_output(layout.evaluate, "report")
    with running(chosen, as_json) as run:
        _finish(demo(run, layout.trajectories, layout.sft_rows, inference, report, folder), as_json)


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

    python = _profile(profile or "laptop", {}).paths.train_python
    text = module.run(python, revert=revert, dry_run=dry_run)
    emit({"result": text}, as_json, text)


@app.command("validate-tasks")
def validate_tasks(
    tasks: Annotated[Path, typer.Option("--tasks", help="JSONL of tasks.")],
    backend: Backend = None,
    concurrency: Concurrency = None,
    profile: ProfileName = None,
    as_json: Json = False,
) -> None:
    """Accept a task only when its reference solution passes and doing nothing fails."""
    from agentexecutor.console import emit, reporter
    from agents.validate import validate_file

    chosen = _profile(profile or "laptop", {"sandboxes.backend": backend, "collect.concurrency": concurrency})
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
    emit({"tasks": len(tasks), "out": str(out)}, as_json, f"{len(tasks)} tasks → {out}; next: agentexecutor validate-tasks --tasks {out}")


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
def plan(profile: ProfileName = None, memory_gb: Annotated[float, typer.Option("--memory-gb", help="Memory of one card.")] = 80.0, as_json: Json = False) -> None:
    """Memory arithmetic of a profile: does it fit, and which knob to turn."""
    from agentexecutor.console import emit
    from training.plan import plan as arithmetic
    from training.plan import render

    budget = arithmetic(_profile(profile, {}), memory_gb)
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

    gone = sweep(_profile(profile, {"paths.output": output_dir}), keep=keep, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    emit({"deleted": [str(p) for p in gone], "dry_run": dry_run}, as_json, "\n".join(f"{verb} {p}" for p in gone) or "nothing to delete")


@app.command("all")
def everything(
    llm: Llm = None,
    backend: Backend = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Annotated[list[str] | None, typer.Option("--force", help="Step to run although it is unchanged; repeatable.")] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """The whole loop in one process: collect → export → sft → rl-prepare → grpo → evaluate → infer → demo."""
    from agentexecutor.console import emit, running, show_pipeline
    from configs.load import require_keys

    flags = {"teacher.llm": llm, "sandboxes.backend": backend, "paths.data": data_dir, "paths.output": output_dir}
    chosen = _profile(profile, flags, say=True)
    require_keys(chosen, teacher=True, sandboxes=True)
    if dry_run:
        from configs.load import dump_profile

        return emit(chosen.model_dump(mode="json"), as_json, dump_profile(chosen) + "would run: collect → export → sft → rl-prepare → grpo → evaluate → infer → demo")
    with running(chosen, as_json, frozenset(force or ())) as run:
        from tasks_lib.server import run_all

        show_pipeline(run, run_all(run), as_json)


@app.command()
def doctor(profile: ProfileName = None, as_json: Json = False) -> None:
    """Check this machine for a profile, and print the fix for each failing line."""
    from agentexecutor.console import emit
    from tasks_lib.doctor import examine

    lines = examine(_profile(profile, {}))
    text = "\n".join(f"{'ok ' if line.ok else 'BAD'} {line.what}{'' if line.ok else ' — ' + line.fix}" for line in lines)
    emit([line.model_dump() for line in lines], as_json, text)
    if not all(line.ok for line in lines):
        raise SystemExit(1)


@app.command()
def deploy(
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Make Prefect's pools, limits and deployments; run again, it changes only what differs."""
    from agentexecutor.console import emit
    from tasks_lib.deploy import deploy as register

    changes = register(_profile(profile, {}), dry_run=dry_run)
    emit({"changes": changes}, as_json, "\n".join(changes) or "everything is as it should be")


def _forced(force: bool, step: str) -> frozenset[str]:
    return frozenset({step} if force else ())
