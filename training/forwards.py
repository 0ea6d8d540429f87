"""Forward passes that a GRPO step need not make; on two cores they are half of its time.

ms-swift passes every rollout three times through the model and once backward: for the old policy's log-probabilities, for the reference's, and for the
loss. On-policy the old policy is the one that is trained, so the loss's own pass gives its log-probabilities (as `old_per_token_logps = None` means
in ms-swift and TRL). And a group whose rewards are all equal has no advantage: it gives no gradient (training/scored.py), so one process leaves its
passes out. Several processes make them all the same, because a rank that skips a pass leaves the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from training.patching import expect, replace
from training.scored import leaves_out, row_signals


def no_needless_forwards() -> str:
    """Patch ms-swift's GRPO trainer accordingly; called by training/patches.py."""
    from swift.rlhf_trainers import GRPOTrainer

    expect(
        GRPOTrainer._prepare_batch_inputs, "grpo_batch.old_per_token_logps = (", "grpo_batch.ref_per_token_logps = ref"
    )
    expect(GRPOTrainer._compute_loss_and_metrics, "if grpo_batch.old_per_token_logps is None")
    expect(GRPOTrainer._update_metrics, "if 'kl' in metrics_data", "if 'clipping' in metrics_data")
    expect(GRPOTrainer._compute_loss_single, "self._compute_loss_and_metrics(model, model_inputs, grpo_batch)")
    done = replace(GRPOTrainer, "_prepare_batch_inputs", _prepare)
    replace(GRPOTrainer, "_get_per_token_logps_and_entropies", _logps)
    replace(GRPOTrainer, "_compute_loss_and_metrics", _loss)
    return done


def idle_batches(signals: Sequence[bool]) -> list[bool]:
    """Which micro-batches need no pass, from whether each holds a rollout with an advantage. One is always kept: the sampler is checked by it."""
    kept = next((at for at, signal in enumerate(signals) if signal), 0)
    return [not signal and at != kept for at, signal in enumerate(signals)]


class _Preparing:
    """The micro-batches of one generation as ms-swift prepares them, each asked first for the old policy, then for the reference."""

    def __init__(self, trainer: Any, signals: Sequence[bool], sizes: Sequence[int]) -> None:
        plain = (
            not trainer.use_liger_loss and not trainer.kl_in_reward
        )  # these read the log-probabilities on other ways
        self.skip_old = plain and not trainer.old_policy() and not trainer._has_teacher_explicit()
        # DeepSpeed counts forward passes to know which gradients to add up: it needs them all.
        self.alone = (
            self.skip_old
            and leaves_out(trainer)
            and trainer.accelerator.num_processes == 1
            and not trainer.is_deepspeed_enabled
        )
        rows = iter(signals)
        self.idle = idle_batches([any(list(islice(rows, size))) for size in sizes])
        self.seen: list[Any] = []

    def needless(self, batch: Any) -> bool:
        if self.seen and self.seen[-1] is batch:  # the second time: the reference
            return bool(batch.idle)
        batch.idle = self.alone and self.idle[len(self.seen)]
        self.seen.append(batch)
        return self.skip_old


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(self: Any, samples: list[Any]) -> Any:
        if self.template.sequence_parallel_size > 1 or not self.model.training:
            return original(self, samples)
        sizes = [len(chunk) for chunk in self.split_by_mini_batches(samples)]
        self._preparing = _Preparing(self, row_signals(self), sizes)
        try:
            return original(self, samples)
        finally:
            self._preparing = None

    return prepare


def _logps(original: Callable[..., Any]) -> Callable[..., Any]:
    def logps(self: Any, model: Any, model_inputs: Any, grpo_batch: Any, *args: Any, **kwargs: Any) -> Any:
        preparing = getattr(self, "_preparing", None)
        if preparing is not None and preparing.needless(grpo_batch):
            return None, None
        return original(self, model, model_inputs, grpo_batch, *args, **kwargs)

    return logps


def _loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        if not getattr(grpo_batch, "idle", False):
            loss, metrics = original(self, model, model_inputs, grpo_batch)
            return loss * getattr(grpo_batch, "weight", 1.0), metrics
        if self.compute_entropy:  # ms-swift pairs these with the logged completions
            self._logs["entropy"].extend([float("nan")] * grpo_batch.completion_mask.shape[0])
        anchor = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        return anchor.sum() * 0.0, {"mode": "train" if self.model.training else "eval", "entropy": {}}

    return compute
