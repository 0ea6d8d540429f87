"""The evaluate step: real episodes of the base and of every adapter on held-out tasks, one server, one report.

Finished episodes are stored one by one under a key of everything that decides them, so that a run that was killed goes on where it was, and a new
adapter costs only its own episodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from agents.task import Task, load_tasks, refuse_overlap
from configs.files import digest_file, digest_json, read_jsonl, write_atomic, write_json
from configs.manifest import StepResult, read_manifest, run_step
from configs.profile import Profile
from configs.run import Layout, Run
from training.arguments import BASE_NAME
from training.checkpoints import CONFIG, WEIGHTS, check_adapter, new_version, versions
from training.heldout import HeldoutEpisodes, Plan, Policy
from training.models import check_model
from training.page import html
from training.probe import PROBES
from training.report import build, headline, markdown
from training.results import write_results
from training.serve import command
from training.sft import model_digest as model_digest
from training.times import Spent, spent
from training.trainer import METRICS
from training.versions import train_versions

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class _Digests:
    model: str
    adapters: dict[str, str]
    settings: dict[str, Any]

    def policy(self, name: str) -> str:
        """Everything but the task that decides an episode of this policy."""
        return digest_json([VERSION, self.model, self.adapters.get(name), self.settings])[:16]


def evaluate(run: Run, tasks: Path, adapters: Mapping[str, Path]) -> StepResult:
    """Evaluate the base and `adapters` (name → checkpoint folder) on the held-out `tasks`.

    Outputs: results (parquet), report (JSON), markdown, html. Raises `UserError` when a held-out task is also a training task, when an adapter is
    broken or made for another base, or where sandboxes cannot run; `WorkFailed` when the server dies (finished episodes are kept).
    """
    profile = run.profile
    heldout = load_tasks(tasks)[: profile.evaluate.max_tasks]
    for trained in filter(Path.is_file, profile.trained_tasks):
        refuse_overlap(load_tasks(trained), heldout)
    check_model(profile.model_path)
    for path in adapters.values():
        check_adapter(path, profile.model_path)
    command(run, adapters, 0)  # refuses a name that cannot be served, before anything is started
    digests = _digests(profile, adapters)
    layout = Layout(profile)
    inputs = {
        "tasks": digest_json([[task.id, task.digest] for task in heldout]),
        "model": digests.model,
        "settings": digest_json([digests.settings, profile.evaluate.attempts, list(adapters)]),
        **{f"adapter {name}": digest for name, digest in digests.adapters.items()},
    }
    installed = train_versions(profile)

    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        return _make(run, tasks, heldout, adapters, digests, installed)

    return run_step(
        "evaluate",
        version=VERSION,
        inputs=inputs,
        candidates=lambda: _whole(versions(layout.evaluate)),
        make=make,
        force="evaluate" in run.force,
        versions=installed,
    )


def _whole(folders: list[Path]) -> list[Path]:
    """An evaluation with episodes that could not be scored is not finished: they are tried again, and only they."""
    return [
        folder
        for folder in folders
        if not (manifest := read_manifest(folder)) or not manifest.summary.get("not_scored")
    ]


def _make(
    run: Run,
    tasks: Path,
    heldout: list[Task],
    adapters: Mapping[str, Path],
    digests: _Digests,
    installed: dict[str, str],
) -> tuple[Path, dict[str, Path], dict[str, Any]]:
    started = time.monotonic()
    profile, layout = run.profile, Layout(run.profile)
    names = [BASE_NAME, *adapters]
    policies = [Policy(name, layout.evaluate / "episodes" / digests.policy(name)) for name in names]
    plan = Plan(heldout, policies, profile.evaluate.attempts)
    outcome = HeldoutEpisodes(run, plan, adapters, reuse="evaluate" not in run.force).run_missing()
    folder = new_version(layout.evaluate)
    outputs = {
        "results": folder / "results.parquet",
        "report": folder / "report.json",
        "markdown": folder / "report.md",
        "html": folder / "report.html",
    }
    write_results(outputs["results"], outcome.rows)
    steps = [
        spent(f"{name} training", manifest.seconds, manifest.summary)
        for name, path in adapters.items()
        if (manifest := read_manifest(path.parent))
    ]
    seconds = time.monotonic() - started
    steps.append(Spent("evaluation", round(seconds, 1), outcome.time, outcome.peak_memory_gib))
    tokens = sum(row.completion_tokens for row in outcome.rows) if not outcome.reused else 0
    about: dict[str, Any] = {
        "model": profile.model.id,
        "profile": profile.name,
        "tasks": {"file": tasks.name, "count": len(heldout), "families": sorted({task.family for task in heldout})},
        "adapters": {
            name: digest_file(path / WEIGHTS) for name, path in adapters.items()
        },  # as `sha256sum` and infer say it
        "settings": {**digests.settings, "attempts": profile.evaluate.attempts},
        "engine": outcome.engine,
        "versions": installed,
        "reused_episodes": outcome.reused,
        "tokens_per_second": round(tokens / outcome.episodes_s, 1) if tokens and outcome.episodes_s else None,
        "time": [asdict(step) for step in steps],
    }
    report = build(outcome.rows, names, profile.evaluate.attempts, about)
    report["headline"] = headline(report["policies"])
    write_json(outputs["report"], report)
    write_atomic(outputs["markdown"], markdown(report))
    write_atomic(
        outputs["html"], html(report, {name: rows for name, path in adapters.items() if (rows := _metrics(path))})
    )
    measured = {"time": outcome.time, "peak_memory_gib": outcome.peak_memory_gib} if outcome.time else {}
    return folder, outputs, _summary(report) | measured


def _summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Small JSON for people."""
    return {
        "verdict": report["headline"],
        "not_scored": sum(p["not_scored"] for p in report["policies"]),
        **{
            p["name"]: {key: p[key] for key in ("passes", "attempts", "rate", "low", "high", "not_scored")}
            for p in report["policies"]
        },
        **{
            f"{d['policy']} - {d['against']}": {key: d[key] for key in ("difference", "low", "high", "p_value")}
            for d in report["differences"]
        },
    }


def _digests(profile: Profile, adapters: Mapping[str, Path]) -> _Digests:
    return _Digests(
        model_digest(profile.model_path),
        {name: adapter_digest(path) for name, path in adapters.items()},
        settings(profile),
    )


def settings(profile: Profile) -> dict[str, Any]:
    """What decides an episode besides model, adapter and task. Concurrency and paths do not."""
    return {
        "temperature": profile.evaluate.temperature,
        "max_tokens": profile.evaluate.max_tokens,
        "max_turns": profile.collect.max_turns,
        "tools": list(profile.collect.tools),
        **({"seed": profile.seed} if profile.evaluate.temperature > 0 else {}),  # greedy, it changes nothing
        "template": profile.model.template,
        "agent_template": profile.model.agent_template,
        "thinking": profile.model.thinking,
        "max_model_len": profile.rollout.max_model_len,
        "sandboxes": profile.sandboxes.model_dump(mode="json", exclude={"lifetime_s"}),
    }


def adapter_digest(path: Path) -> str:
    """SHA-256 over an adapter's weights and configuration (its scaling is there): what it does, wherever its folder lies."""
    return digest_json([digest_file(path / WEIGHTS), digest_file(path / CONFIG)])


def _metrics(adapter: Path) -> list[dict[str, float]]:
    """The training's metrics beside an adapter, and its probes; none where it was made elsewhere."""
    files = [adapter.parent / name for name in (METRICS, PROBES)]
    return [row for file in files if file.is_file() for row in read_jsonl(file)]
