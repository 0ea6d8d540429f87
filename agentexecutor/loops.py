"""Commands over several steps, and a single trial."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentexecutor.options import Backend, DataDir, DryRun, Json, Llm, MaxTurns, OutputDir, ProfileName, app, effective


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

    chosen = effective(profile, {"sandboxes.backend": backend, "teacher.llm": llm, "collect.max_turns": max_turns})
    if dry_run:
        plan = {
            "prompt": prompt,
            "backend": chosen.sandboxes.backend,
            "llm": chosen.teacher.llm,
            "max_turns": chosen.collect.max_turns,
        }
        emit(plan, as_json, "would run one episode: " + ", ".join(f"{k} {v!r}" for k, v in plan.items()))
        return
    trajectory, files = run_prompt(chosen, prompt)
    emit(
        {"trajectory": trajectory.model_dump(mode="json"), "files": files},
        as_json,
        render_trajectory(trajectory, files),
    )
    if trajectory.stop_reason in ("infra_error", "agent_error"):
        raise SystemExit(1)


@app.command("all")
def everything(
    llm: Llm = None,
    backend: Backend = None,
    data_dir: DataDir = None,
    output_dir: OutputDir = None,
    profile: ProfileName = None,
    force: Annotated[
        list[str] | None, typer.Option("--force", help="Step to run although it is unchanged; repeatable.")
    ] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """The whole loop in one process: collect → export → sft → rl-prepare → grpo → evaluate → infer → demo."""
    from agentexecutor.console import emit, running, show_pipeline
    from configs.load import require_keys

    flags = {"teacher.llm": llm, "sandboxes.backend": backend, "paths.data": data_dir, "paths.output": output_dir}
    chosen = effective(profile, flags, say=True)
    require_keys(chosen, teacher=True, sandboxes=True)
    if dry_run:
        from configs.load import dump_profile

        emit(
            chosen.model_dump(mode="json"),
            as_json,
            dump_profile(chosen) + "would run: collect → export → sft → rl-prepare → grpo → evaluate → infer → demo",
        )
        return
    with running(chosen, as_json, frozenset(force or ())) as run:
        from flows.local import run_all

        show_pipeline(run, run_all(run), as_json)


@app.command("rl-loop")
def rl_loop(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of rollout and training.")] = 3,
    patience: Annotated[
        int, typer.Option("--patience", min=1, help="Stop after this many rounds without a better held-out pass rate.")
    ] = 2,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="LoRA to start from; default: the newest SFT LoRA.")
    ] = None,
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

    chosen = effective(profile, {"paths.data": data_dir, "paths.output": output_dir}, say=not dry_run)
    if dry_run:
        plan = {"rounds": rounds, "patience": patience, "folder": str(Layout(chosen).grpo / "round-001")}
        emit(
            plan,
            as_json,
            f"would run {rounds} rounds from {plan['folder']} on, and stop after {patience} without progress",
        )
        return
    require_keys(chosen, teacher=False, sandboxes=True)
    start = adapter.absolute() if adapter else newest_adapter(Layout(chosen).sft)
    with running(chosen, as_json) as run:
        best = loop(run, start, rounds=rounds, patience=patience)
        emit(
            best, as_json, f"best: round {best['round']}, held-out pass rate {best['pass_rate']:.1%}, {best['adapter']}"
        )


@app.command()
def deploy(
    profile: ProfileName = None,
    as_json: Json = False,
    dry_run: DryRun = False,
) -> None:
    """Make Prefect's pools, limits and deployments; run again, it changes only what differs."""
    from agentexecutor.console import emit
    from tasks_lib.deploy import deploy as register

    if profile is not None:
        effective(profile, {})  # refused now, and not at three in the morning
    changes = register(profile, dry_run=dry_run)
    emit({"changes": changes}, as_json, "\n".join(changes) or "everything is as it should be")
