"""Rounds of GRPO (`rl-loop`): each goes on from the best adapter so far with fresh rollouts; the best one is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from configs.errors import WorkFailed
from configs.files import write_json
from configs.run import Layout, Run
from training.evaluate import evaluate
from training.grpo import grpo, prepare

BEST: Final = "best.json"
"""The best round so far, with the history."""


def rounds(run: Run, start: Path, *, rounds: int, patience: int) -> dict[str, Any]:
    """Run up to `rounds` rounds into round-NNN/ and return the best one: {round, adapter, pass_rate, history}.

    Round 0 is `start` itself. A round goes on from the best adapter so far with another seed; after `patience` rounds without a better held-out pass
    rate the loop ends. Each round is a step with a manifest of its own, so the same call resumes where it was stopped. The base is evaluated once:
    its episodes are reused.
    """
    layout = Layout(run.profile)
    prompts = prepare(run, run.profile.rl_tasks, layout.rl_rows).outputs["rows"]
    best: dict[str, Any] = {"round": 0, "adapter": str(start), "pass_rate": pass_rate(run, start)}
    history = [dict(best)]
    for number in range(1, rounds + 1):
        seeded = Run(
            run.profile.model_copy(update={"seed": run.profile.seed + number}), run.run_id, run.report, run.force
        )
        made = grpo(seeded, prompts, Path(best["adapter"]), parent=layout.grpo / f"round-{number:03d}")
        now = {
            "round": number,
            "adapter": str(made.outputs["adapter"]),
            "pass_rate": pass_rate(run, made.outputs["adapter"]),
        }
        history.append(now)
        if now["pass_rate"] > best["pass_rate"]:
            best = dict(now)
        write_json(layout.grpo / BEST, {**best, "history": history})
        run.event("round", **now)
        if number - best["round"] >= patience:
            break
    return {**best, "history": history}


def pass_rate(run: Run, adapter: Path) -> float:
    """Held-out pass rate of one adapter: passed over scored. Raises `WorkFailed` where nothing could be scored."""
    report = json.loads(
        evaluate(run, run.profile.evaluate.tasks, {"lora": adapter}).outputs["report"].read_text(encoding="utf-8")
    )
    rate: float | None = next(policy["rate"] for policy in report["policies"] if policy["name"] == "lora")
    if rate is None:
        raise WorkFailed(
            f"no held-out episode of {adapter} could be scored, so rounds cannot be compared; the report says why: evaluate, not scored."
        )
    return rate
