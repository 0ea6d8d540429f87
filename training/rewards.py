"""The reward `agent_verifier`, and the record of every rollout. Imported by the plugin, inside the trainer only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift.rewards import AsyncORM

from agents.reward import reward
from agents.trajectory import StopReason, Trajectory
from configs.load import load_profile
from training.rollout import PROFILE_VARIABLE, ROLLOUTS


class AgentVerifier(AsyncORM):  # type: ignore[misc]
    """agents/reward.py with the profile's weights: 1 for a rollout whose grading passed; None where it was not scored."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        self.weights = load_profile(Path(os.environ[PROFILE_VARIABLE]), environ={}).grpo

    async def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        return [self.one(infos) for infos in columns["rollout_infos"]]

    def one(self, infos: dict[str, Any]) -> float | None:
        trajectory = Trajectory.model_validate(infos["trajectory"])
        return reward(
            trajectory.outcome,
            bool(trajectory.extra["well_formed"]),
            self.weights.format_reward,
            finished=trajectory.stop_reason is StopReason.FINISHED,
            unfinished_reward=self.weights.unfinished_reward,
        )


def save_rollouts(trainer: Any, samples: list[Any], rewards: list[float]) -> None:
    """Append this rank's rollouts of a step, with what was trained: `extra` gets step, group, reward parts, advantage and trained ids."""
    rank = int(os.environ.get("RANK", "0"))
    path = Path(trainer.args.output_dir) / ROLLOUTS / f"rank{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    step = trainer.state.global_step + 1
    lines = []
    for sample, value in zip(samples, rewards, strict=True):
        trajectory = Trajectory.model_validate(sample.rollout_infos["trajectory"])
        scored = value == value
        trajectory.extra |= {
            "mode": "train" if trainer.model.training else "eval",
            "step": step,
            "group": f"{step}-{sample.prompt_id}",
            "rollout": sample.request_id,
            "reward": value if scored else None,
            "reward_parts": {
                "verdict": trajectory.outcome.reward,
                "well_formed": trajectory.extra["well_formed"],
                "stop_reason": trajectory.stop_reason,
            },
            "advantage": float(sample.advantages) if scored else None,
            "trained_token_ids": [label for label in sample.encoded["labels"] if label != -100] if scored else [],
        }
        lines.append(json.dumps(trajectory.model_dump(mode="json"), ensure_ascii=False) + "\n")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, "".join(lines).encode("utf-8", "replace"))
    finally:
        os.close(handle)
