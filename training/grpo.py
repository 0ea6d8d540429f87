"""The rl-prepare and grpo steps: prompts from tasks, then LoRA GRPO with real sandbox rollouts as a supervised child."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from agents.task import Task, load_tasks, refuse_overlap
from agents.tools import schemas
from configs.errors import UserError, WorkFailed
from configs.files import digest_file, digest_json, read_jsonl, write_json, write_jsonl
from configs.manifest import StepResult, run_step
from configs.profile import Profile
from configs.run import Layout, Run
from sandboxes import SandboxError, make_for
from training import encode, validation
from training.arguments import Job, grpo_command
from training.checkpoints import check_adapter, interrupted, last_whole, new_version, versions
from training.collapse import entropy_gone
from training.engine import with_engine
from training.evaluate import adapter_digest, model_digest
from training.launch import Command
from training.metrics import Logged
from training.models import check_model
from training.probe import PROBES, VALIDATION_VARIABLE
from training.rollout import PROFILE_VARIABLE, ROLLOUTS, RUN_ID_VARIABLE, rank_run_id
from training.rows import Row, prompt_row
from training.trainer import METRICS, train
from training.versions import train_versions

PREPARE_VERSION: Final = 1
VERSION: Final = 1
REPORT: Final = "report.json"


def prepare(run: Run, tasks: Path, out: Path) -> StepResult:
    """Write one prompt row a training task to `out`, families interleaved, and report.json beside.

    A row holds the prompt exactly as SFT rows begin, and the task as JSON for the sandbox side; the chat template reads the prompt alone. Raises
    `UserError` for unreadable tasks.
    """
    profile = run.profile
    layout, model = Layout(profile), profile.model
    check_model(profile.model_path)
    sft_rows = layout.sft_rows if layout.sft_rows.is_file() else None
    limit = min(model.max_length, profile.rollout.max_model_len) - profile.grpo.max_completion_length
    inputs = {
        "tasks": digest_file(tasks) if tasks.is_file() else "",
        "tools": digest_json(schemas(profile.collect.tools)),
        "model": model_digest(profile.model_path),
        "format": digest_json([model.template, model.agent_template, model.thinking, limit, profile.seed]),
        "sft rows": digest_file(sft_rows) if sft_rows else "",
    }

    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        accepted = load_tasks(tasks)
        if profile.evaluate.tasks.is_file():
            refuse_overlap(accepted, load_tasks(profile.evaluate.tasks))
        run.progress("rl-prepare", 0, len(accepted), "checking the prompts with the tokenizer")
        everything = out.with_name("prompts.jsonl")
        write_jsonl(everything, prompt_rows(profile, accepted))
        report_file = out.parent / REPORT
        found = encode.check(run, "rl", everything, out, report_file, limit=limit, against=sft_rows)
        everything.unlink()
        families = Counter(row["family"] for row in read_jsonl(out))
        report: dict[str, Any] = {
            "tasks": len(accepted),
            "rows": found["kept"],
            "families": dict(sorted(families.items())),
            "dropped": found["dropped"],
            "longest_prompt": found["longest"],
            "same_prompt_as_sft": found["compared"],
        }
        write_json(report_file, {**report, "named": found["named"], "limit": limit})
        run.progress("rl-prepare", len(accepted), len(accepted), f"{found['kept']} prompts of {len(families)} families")
        return out.parent, {"rows": out, "report": report_file}, report

    return run_step(
        "rl-prepare",
        version=PREPARE_VERSION,
        inputs=inputs,
        candidates=lambda: [out.parent],
        make=make,
        force="rl-prepare" in run.force,
    )


def prompt_rows(profile: Profile, tasks: Sequence[Task]) -> list[Row]:
    """One row a task: shuffled within its family by the profile's seed, families in turn, so that each step sees several."""
    offered = schemas(profile.collect.tools)
    return [
        {**prompt_row(task, offered, profile.model), "family": task.family, "task": task.model_dump_json()}
        for task in interleaved(tasks, profile.seed)
    ]


def interleaved(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks, one of each family in turn; a larger family's rest is spread over the whole instead of left for the end."""
    chance = random.Random(seed)
    placed: list[tuple[float, str, Task]] = []
    for family in sorted({task.family for task in tasks}):
        mine = [task for task in tasks if task.family == family]
        chance.shuffle(mine)
        placed += [((place + 0.5) / len(mine), family, task) for place, task in enumerate(mine)]
    return [task for _, _, task in sorted(placed, key=lambda item: item[:2])]


def command(
    run: Run, rows: Path, adapter: Path | None, output: Path | None = None, resume: Path | None = None
) -> Command:
    """What the grpo step starts. Pure; without `output` for showing only."""
    folder = output or Layout(run.profile).grpo / "vN-<timestamp>"
    job = Job(run.profile, rows=rows, output=folder, adapter=adapter, resume=resume)
    env = {PROFILE_VARIABLE: str(run.folder / "profile.yaml"), RUN_ID_VARIABLE: run.run_id}
    if run.profile.grpo.validation:
        env[VALIDATION_VARIABLE] = str(folder / validation.ROWS)
    return grpo_command(job, env)


def grpo(run: Run, rows: Path, adapter: Path | None, *, parent: Path | None = None) -> StepResult:
    """Train by GRPO on `rows`, going on from `adapter` (None: from the base).

    `parent` is where the vN folder goes, by default that of the model's GRPO runs. Outputs: adapter (the checkpoint that is best on the validation
    tasks, and the last one where the profile names none), metrics (one row a step), rollouts (every trajectory), probes. A collapse ends the training
    early and is no failure. Without vLLM in the train environment the rollouts are generated by transformers. An interrupted run with equal inputs
    is resumed from its last whole checkpoint. Raises `UserError` for broken inputs, `WorkFailed` with the log's tail when the trainer fails.
    """
    check_model(run.profile.model_path)
    run, _ = with_engine(run)
    profile = run.profile
    folder = parent or Layout(profile).grpo
    if not rows.is_file():
        raise UserError(f"{rows}: there are no GRPO prompts; make them with `agentexecutor rl-prepare`.")
    if adapter is not None:
        check_adapter(adapter, profile.model_path)
    inputs = {
        "rows": digest_file(rows),
        "model": model_digest(profile.model_path),
        "adapter": adapter_digest(adapter) if adapter else "",
        "settings": digest_json(settings(profile)),
    }
    tasks = validation.validation_tasks(profile)
    inputs |= validation.inputs(profile, tasks, rows)

    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        return _make(run, rows, adapter, folder, inputs, tasks)

    force = "grpo" in run.force
    return run_step(
        "grpo",
        version=VERSION,
        inputs=inputs,
        candidates=lambda: versions(folder),
        make=make,
        force=force,
        versions=train_versions(profile),
    )


def settings(profile: Profile) -> dict[str, Any]:
    """What decides the result besides rows, base and adapter. Paths and concurrency do not."""
    return {
        "grpo": profile.grpo.model_dump(
            mode="json", exclude={"save_steps", "log_completions", "validation", "probe_tasks"}
        ),
        "lora": profile.lora.model_dump(mode="json"),
        "model": profile.model.model_dump(mode="json", exclude={"folder", "source"}),
        "rollout": profile.rollout.model_dump(mode="json", include={"engine", "max_model_len"}),
        "processes": [profile.on_cpu, profile.hardware.nproc, profile.hardware.nnodes, profile.hardware.deepspeed],
        "sandboxes": profile.sandboxes.model_dump(mode="json", exclude={"lifetime_s"}),
        "tools": list(profile.collect.tools),
        "seed": profile.seed,
    }


def _make(
    run: Run, rows: Path, adapter: Path | None, parent: Path, inputs: dict[str, str], tasks: Sequence[Task]
) -> tuple[Path, dict[str, Path], dict[str, Any]]:
    folder = (None if "grpo" in run.force else interrupted(parent, inputs)) or new_version(parent, inputs)
    resume = last_whole(folder)
    done = int(resume.name.rsplit("-", 1)[-1]) if resume else 0
    validation.forget_after(folder, done)
    if tasks:
        write_jsonl(folder / validation.ROWS, prompt_rows(run.profile, tasks))
    run.progress("grpo", done, 0, f"resuming after step {done}" if resume else "loading the model and the sampler")
    try:
        trained = train(
            run,
            "grpo",
            command(run, rows, adapter, folder, resume),
            folder,
            resume,
            shown=SHOWN,
            on_step=_watch_entropy(run, folder),
        )
    finally:
        _sweep(run)
    made = validation.probes(folder)
    result = validation.chosen(folder, adapter, trained.adapter)
    check_adapter(result, run.profile.model_path)
    if not trained.rows:
        raise WorkFailed(f"grpo: no step was logged; see {run.log('grpo')}.")
    outputs = {"adapter": result, "metrics": folder / METRICS, "rollouts": folder / ROLLOUTS}
    outputs |= {"probes": folder / PROBES} if made else {}
    figures = (
        summary(trained.rows)
        | validation.summary(made)
        | {
            "time": trained.time,
            "peak_memory_gib": round(trained.peak_bytes / 2**30, 2),
            "resumed_from": resume.name if resume else "",
        }
    )
    return folder, outputs, figures


SHOWN: Final = {
    "reward": "reward",
    "pass_rate": "agent/pass_rate",
    "not_scored": "agent/not_scored",
    "kl": "kl",
    "entropy": "entropy/mean",
    "gap": "rollout_correction/log_ppl_abs_diff",
}
"""Figure on the progress line → ms-swift's key. `gap` is trainer against sampler: mean difference of a rollout's log-probability a token, in nats."""


def summary(metrics: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Small JSON for people: first and last step's figures, and the worst gap between trainer and sampler."""
    first, last = metrics[0], metrics[-1]
    gaps = [row[SHOWN["gap"]] for row in metrics if SHOWN["gap"] in row]
    return {
        "steps": int(last["step"]),
        "reward": [round(row["reward"], 4) for row in (first, last) if "reward" in row],
        "pass_rate": [round(row[SHOWN["pass_rate"]], 4) for row in (first, last) if SHOWN["pass_rate"] in row],
        "reward_by_family": {
            key.removeprefix(FAMILY): round(value, 4) for key, value in last.items() if key.startswith(FAMILY)
        },
        "not_scored": int(sum(row.get(SHOWN["not_scored"], 0) for row in metrics)),
        "largest_gap": round(max(gaps), 8) if gaps else None,
    }


FAMILY: Final = "agent/reward/"


def _watch_entropy(run: Run, folder: Path) -> Callable[[Logged], None]:
    """Warns once when it falls to nearly nothing; the training goes on, because only validation can tell whether that is bad."""
    file, key = folder / METRICS, SHOWN["entropy"]
    start = [row[key] for row in (read_jsonl(file) if file.is_file() else []) if key in row][:1]
    warned: list[str] = []

    def watch(logged: Logged) -> None:
        now = logged.values.get(key)
        if now is None or now != now or warned:  # NaN: nothing of the step was scored
            return
        start.extend([] if start else [now])
        if reason := entropy_gone(start[0], now):
            warned.append(reason)
            run.event("warning", step="grpo", note=f"step {logged.step}: {reason}")
            run.progress("grpo", logged.step, logged.max_steps, reason)

    return watch


def _sweep(run: Run) -> None:
    """Kill the sandboxes that ranks left behind: a rank that was killed could not."""

    async def sweep() -> int:
        backend = make_for(run.profile.sandboxes)
        return sum([await backend.sweep(rank_run_id(run.run_id, rank)) for rank in range(run.profile.hardware.nproc)])

    try:
        left = asyncio.run(sweep())
    except SandboxError as error:
        run.event("warning", step="grpo", note=f"sandboxes could not be swept ({error}); their lifetime ends them")
        return
    if left:
        run.event("warning", step="grpo", note=f"{left} sandboxes of dead ranks were killed")
