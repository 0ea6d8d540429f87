"""The sft step: LoRA SFT on verified tool trajectories, by ms-swift under torchrun."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from configs.errors import UserError, WorkFailed
from configs.files import digest_file, digest_json
from configs.manifest import StepResult, run_step
from configs.run import Layout, Run
from training import checkpoints, encode
from training.arguments import Job, sft_command
from training.clock import START
from training.launch import Command
from training.models import MANIFEST as MODEL_MANIFEST
from training.models import check_model
from training.trainer import METRICS, train

VERSION: Final = 1
ROWS: Final = "rows.jsonl"
"""The rows that the tokenizer agreed to, in the run's own folder."""
REPORT: Final = "encode.json"


def sft(run: Run, rows: Path) -> StepResult:
    """Train an adapter on `rows`; goes on from the last whole checkpoint of an interrupted run with the same inputs.

    Outputs: `adapter` (…/vN-<timestamp>/checkpoint-N) and `metrics` (metrics.jsonl). Raises `UserError` for a missing model or rows and `WorkFailed`
    with the log's tail when training fails.
    """
    if not rows.is_file():
        raise UserError(f"{rows}: there are no rows to train on; make them with `python -m agentexecutor export`.")
    check_model(run.profile.model_path)
    folder, inputs = Layout(run.profile).sft, _inputs(run, rows)
    return run_step(
        "sft",
        version=VERSION,
        inputs=inputs,
        candidates=lambda: checkpoints.versions(folder),
        make=lambda: _make(run, rows, folder, inputs),
        force="sft" in run.force,
    )


def command(run: Run, rows: Path) -> Command:
    """What `sft` would start, for --dry-run. Pure."""
    return sft_command(Job(run.profile, rows=rows, output=Layout(run.profile).sft / "vN-<timestamp>"))


def _make(run: Run, rows: Path, folder: Path, inputs: dict[str, str]) -> tuple[Path, dict[str, Path], dict[str, Any]]:
    version = None if "sft" in run.force else checkpoints.interrupted(folder, inputs)
    version = version or checkpoints.new_version(folder, inputs)
    resume = checkpoints.last_whole(version)
    began = time.monotonic()
    run.progress("sft", 0, 0, "checking the rows with the tokenizer")
    report = encode.check(run, "sft", rows, version / ROWS, version / REPORT, limit=run.profile.model.max_length)
    checked = round(time.monotonic() - began, 1)
    run.progress("sft", 0, 0, f"loading the model; {report['kept']} rows, the longest has {report['longest']} tokens")
    trained = train(
        run, "sft", sft_command(Job(run.profile, rows=version / ROWS, output=version, resume=resume)), version, resume
    )
    checkpoints.check_adapter(trained.adapter, run.profile.model_path)
    losses = [row["loss"] for row in trained.rows if "loss" in row]
    if not losses:
        raise WorkFailed(f"sft: no loss was logged; see {run.log('sft')}.")
    summary = {
        "steps": trained.steps,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "rows": report["kept"],
        "rows_dropped": {reason: count for reason, count in report["dropped"].items() if count},
        "longest_tokens": report["longest"],
        "time": trained.time | {START: trained.time.get(START, 0.0) + checked},
        "peak_memory_gib": round(trained.peak_bytes / 2**30, 2),
        "resumed_from": resume.name if resume else "",
    }
    return version, {"adapter": trained.adapter, "metrics": version / METRICS}, summary


def _inputs(run: Run, rows: Path) -> dict[str, str]:
    profile = run.profile
    return {
        "rows": digest_file(rows),
        "model": model_digest(profile.model_path),
        "sft": digest_json(
            [
                profile.model.model_dump(),
                profile.lora.model_dump(),
                profile.sft.model_dump(exclude={"save_steps"}),
                profile.seed,
            ]
        ),
        "processes": digest_json(
            [profile.on_cpu, profile.hardware.nproc, profile.hardware.nnodes, profile.hardware.deepspeed]
        ),
    }


def model_digest(path: Path) -> str:
    """Digest of a base model: of its manifest's file digests (not of its times), or of names and sizes for a user's own folder."""
    manifest = path / MODEL_MANIFEST
    if manifest.is_file():
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return digest_json({name: fact["sha256"] for name, fact in files.items()})
    return digest_json(sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.is_file()))
