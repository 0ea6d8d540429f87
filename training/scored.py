"""Only signal teaches: what enters the mean, the deviation, the advantage and the loss of GRPO.

ms-swift turns a missing reward (None, NaN) into 0, which punishes a policy for a sandbox that died. Here a NaN stays a gap: the group's mean and
deviation are those of the scored rollouts, the gap's tokens are masked, and the loss is the mean over the rest. A group whose scored rewards are all
equal has no advantage and gives no gradient, also none of the KL, which would only pull the policy back to where it started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from training.patching import expect, replace

EPSILON: Final = 1e-4
"""Added to a group's deviation, as in ms-swift and TRL."""

BY_ROLLOUT: Final = frozenset({"grpo", "sapo", "dr_grpo"})
"""Losses that are a mean over rollouts: what is left is scaled up by all / scored."""

BY_TOKEN: Final = frozenset({"bnpo", "dapo", "cispo"})
"""Losses that are a mean over unmasked tokens."""


def group_advantages(rewards: Any, group: int, scale: str) -> Any:
    """Advantages of `rewards` (tensor [N], NaN is a gap), in groups of `group` neighbours: [N], 0 for a gap.

    (r - mean) / (deviation + EPSILON) over the scored of the group (GRPO, arXiv:2402.03300); `scale` is `group`, `batch` or `none`.
    A group whose scored rewards are all equal, or are fewer than two, gives exactly 0.
    """
    import torch

    table = rewards.view(-1, group)
    scored = ~torch.isnan(table)
    filled = torch.where(scored, table, torch.zeros_like(table))
    count = scored.sum(1, keepdim=True)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    off = torch.where(scored, table - mean, torch.zeros_like(table))
    deviation = (off.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    off = torch.where((count > 1) & (deviation > 1e-6), off, torch.zeros_like(off))
    if scale == "group":
        off = off / (deviation + EPSILON)
    elif scale == "batch":
        known = rewards[~torch.isnan(rewards)]
        off = off / ((known.std() if known.numel() > 1 else torch.zeros(())) + EPSILON)
    elif scale != "none":
        raise ValueError(f"scale_rewards {scale!r} is not supported with verifier rewards; use group, batch or none")
    return off.reshape(-1)


def only_scored() -> str:
    """Patch ms-swift's GRPO trainer accordingly; called by training/patches.py."""
    import swift.rlhf_trainers.grpo_trainer as module

    trainer = module.GRPOTrainer
    expect(trainer._compute_advantages, "compute_advantages(", "compute_reward_metrics(")
    expect(
        trainer._postprocess_batch, "self._compute_advantages(samples, self._rewards_per_func, batch_encoded_inputs)"
    )
    logging.getLogger("swift").addFilter(_no_gap_warning)
    done = replace(module, "compute_advantages", _advantages)
    replace(module, "compute_reward_metrics", _reward_metrics)
    replace(trainer, "_score_completions", _count)
    replace(trainer, "_postprocess_batch", _mask)
    return done


def _no_gap_warning(record: logging.LogRecord) -> bool:
    """ms-swift warns of a missing reward by printing the whole rollout; here it is expected, counted and shown as `agent/not_scored`."""
    return "All reward functions returned None" not in str(record.msg)


def _weighted(rewards_per_func: Any, weights: Any) -> Any:
    import torch

    total = (rewards_per_func * weights.unsqueeze(0)).nansum(dim=1)
    return torch.where(torch.isnan(rewards_per_func).all(dim=1), torch.full_like(total, torch.nan), total)


def _advantages(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(rewards_per_func: Any, reward_weights: Any, num_generations: int, **how: Any) -> Any:
        if how.get("advantage_estimator", "grpo") != "grpo" or how.get("kl_in_reward"):
            raise ValueError("verifier rewards with gaps need advantage_estimator grpo without kl_in_reward")
        rewards = _weighted(rewards_per_func, reward_weights)
        return group_advantages(rewards, num_generations, how.get("scale_rewards", "group")), rewards

    return compute


def _reward_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(
        rewards: Any, rewards_per_func: Any, reward_func_names: Any, num_generations: int, scale_rewards: str
    ) -> Any:
        import torch

        # A gap takes its group's mean: no figure moves by it, except a deviation that is a little too small.
        table = rewards.view(-1, num_generations)
        known = table.nanmean(dim=1, keepdim=True)
        known = torch.where(torch.isnan(known), rewards.nanmean(), known)  # all gaps: the mean is no number
        whole = torch.where(torch.isnan(table), known, table).reshape(-1)
        return original(whole, rewards_per_func, reward_func_names, num_generations, scale_rewards)

    return compute


def _count(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass rate, gaps and the reward of each family, over all ranks, into the trainer's metrics."""

    def score(self: Any, samples: list[Any]) -> list[Any]:
        from accelerate.utils import gather_object

        samples = original(self, samples)
        mine = [(s.rollout_infos.get("family", ""), s.rollout_infos.get("verdict", "")) for s in samples]
        rewards = _weighted(self._rewards_per_func, self.reward_weights).tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        everyone = gather_object(mine)
        families: dict[str, list[float]] = {}
        for (family, _), reward in zip(everyone, rewards, strict=True):
            if reward == reward:
                families.setdefault(family, []).append(reward)
        verdicts = self.rollout_verdicts = [verdict for _, verdict in everyone]
        scored = sum(len(values) for values in families.values())
        metrics["agent/scored"].append(scored)
        metrics["agent/not_scored"].append(len(rewards) - scored)
        if scored:
            metrics["agent/pass_rate"].append(verdicts.count("passed") / scored)
        for family, values in sorted(families.items()):
            metrics[f"agent/reward/{family}"].append(sum(values) / len(values))
        return samples

    return score


def _mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """After advantages are known: take what has none out of the loss, and write down every rollout."""

    def postprocess(self: Any, samples: list[Any], batches: list[dict[str, Any]]) -> None:
        import torch
        from accelerate.utils import gather
        from swift.rlhf_trainers.utils import get_even_process_data

        from training.rewards import save_rollouts

        original(self, samples, batches)
        rewards = _weighted(self._rewards_per_func, self.reward_weights)
        scored = ~torch.isnan(rewards)
        save_rollouts(self, samples, get_even_process_data(self, rewards).tolist())
        signal = _signal(self)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["agent/groups_without_signal"].append(int((~signal.view(-1, self.num_generations).any(1)).sum()))
        if signal.all():
            return
        if not leaves_out(self):
            if scored.all():
                return  # ms-swift's own rule then: such a group still feels the KL
            raise RuntimeError(
                f"loss_type {self.loss_type}: {int((~scored).sum())} rollouts were not scored and this setting cannot leave them out."
            )
        share = len(scored) / max(1, int(scored.sum())) if self.loss_type in BY_ROLLOUT else 1.0
        mine = iter(get_even_process_data(self, torch.stack([scored, signal], dim=1)).tolist())
        left = torch.zeros((), device=scored.device)
        for batch in batches:
            rows: Any = batch["grpo_batch"]
            known, taught = zip(*(next(mine) for _ in range(rows.completion_mask.shape[0])), strict=True)
            rows.weight = share if any(taught) else 0.0
            # Without any signal the loss is nothing, and the sampler is still checked by the rows that were scored.
            for row, kept in enumerate(taught if any(taught) else known):
                if not kept:
                    rows.completion_mask[row] = False
            left += rows.completion_mask.sum() if any(taught) else 0
        tokens = gather(left).sum().clamp(min=1)
        for batch in batches:
            batch["grpo_batch"].num_items_in_batch = tokens

    return postprocess


def leaves_out(trainer: Any) -> bool:
    """Whether rollouts can be taken out of this trainer's loss."""
    return (
        trainer.loss_type in BY_ROLLOUT | BY_TOKEN
        and not trainer.dynamic_num_samples
        and trainer.template.sequence_parallel_size == 1
    )


def row_signals(trainer: Any) -> list[bool]:
    """Whether each of this process's rollouts is trained on: it was scored, and its group's scored rewards differ."""
    from swift.rlhf_trainers.utils import get_even_process_data

    return [bool(value) for value in get_even_process_data(trainer, _signal(trainer).tolist())]


def _signal(trainer: Any) -> Any:
    rewards = _weighted(trainer._rewards_per_func, trainer.reward_weights)
    differs = group_advantages(rewards, trainer.num_generations, "none").view(-1, trainer.num_generations).any(1)
    return differs.repeat_interleave(trainer.num_generations) & ~rewards.isnan()
