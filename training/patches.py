"""Fixes of ms-swift at run time, inside the trainer only. Each checks that the code it changes is the code it knows, is idempotent, and says what it did.

Known for ms-swift 4.6.0; another version is refused, because a fix that no longer fits trains on wrong tokens without an error.
Heavy libraries are imported inside the functions: importing this module costs nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from configs.errors import UserError
from training.base_sync import unsafe_reason
from training.forwards import no_needless_forwards
from training.guard import validation_probes
from training.patching import expect, replace
from training.scored import only_scored

KNOWN: Final = ("4.6.0",)

GAP_LIMIT: Final = {"cpu": 1e-4, "cuda": 0.5}
"""Largest mean k3 divergence between trainer and sampler, in nats a token. Without dropout, float32 on CPU shows below 1e-8, and an adapter that is
one optimizer step old 7e-4; bfloat16 shows some 0.02. An adapter that is doubled at each synchronisation showed 10.8 from the second one on. It
cannot see a policy that collapses: there the sampler follows the trainer."""


def apply() -> list[str]:
    """Apply every fix that this process needs; one line each on what was done. Raises `UserError` for an unknown ms-swift."""
    import swift

    if swift.__version__ not in KNOWN:
        raise UserError(
            f"ms-swift {swift.__version__}: the fixes of the GRPO path are known for {', '.join(KNOWN)}; install that version."
        )
    lines = [f"{name}: {patch()}" for name, patch in PATCHES.items()]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for line in lines:
            print(f"agentexecutor patch {line}", flush=True)
    return lines


def skip_base_sync() -> str:
    """Fault 1: the redundant first copy of the base weights (training/base_sync.py)."""
    import torch
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

    expect(RolloutTrainerMixin._prepare_vllm, "self.base_sync_done = False", "self._prepare_vllm_engine()")
    expect(RolloutTrainerMixin._move_model_to_vllm, "not self.base_sync_done", "self._move_adapter_to_vllm()")

    def make(original: Any) -> Any:
        def prepare_vllm(self: Any) -> Any:
            load_format = (self.args.vllm_engine_kwargs or {}).get(
                "load_format", "auto"
            )  # ms-swift removes it from the dict
            result = original(self)
            reason = unsafe_reason(self, load_format) if self.args.use_vllm else "generation is by transformers"
            if not reason:
                self.base_sync_done = True
            elif self.args.use_vllm and self.args.vllm_mode == "colocate" and not torch.cuda.is_available():
                raise UserError(
                    f"the first copy of the base weights into vLLM is impossible on CPU and cannot be left out: {reason}."
                )
            if self.accelerator.is_main_process:
                print(
                    f"agentexecutor base sync: {'first sync kept: ' + reason if reason else 'skipped; vLLM has loaded the same base'}",
                    flush=True,
                )
            return result

        return prepare_vllm

    return replace(RolloutTrainerMixin, "_prepare_vllm", make)


def own_adapter_tensors() -> str:
    """Fault 2: vLLM multiplies lora_B by the scaling in place. Where trainer and vLLM both live on CPU these are the trainer's own parameters."""
    import swift.rlhf_trainers.rollout_mixin as module

    if module.TensorLoRARequest is None:
        return "not needed without vLLM"
    expect(module.RolloutTrainerMixin._move_adapter_to_vllm, "TensorLoRARequest(**req_kw)")

    def make(original: Any) -> Any:
        def request(**fields: Any) -> Any:
            tensors = fields["lora_tensors"].items()
            return original(**fields | {"lora_tensors": {k: v.detach().clone() if v.is_cpu else v for k, v in tensors}})

        return request

    return replace(module, "TensorLoRARequest", make)


def one_separator() -> str:
    """Fault 3, rendering: sampled ids of a turn end with the stop token and the separator before a tool result begins with it; keep one of them.

    ms-swift does so between assistant and user; this does the same between assistant and tool, for training and for the next turn's prompt.
    """
    from swift.template import Template
    from swift.template.utils import get_token_backed_response_ids

    expect(Template._swift_prepare_inputs, "_format_tool_responses(", "{'role': 'tool', 'content': tool_content}")
    expect(Template._remove_response_separator_overlap, "separator_ids[overlap:]")

    def make(original: Any) -> Any:
        def prepare_inputs(self: Any, inputs: Any) -> None:
            original(self, inputs)
            for before, message in zip(inputs.messages, inputs.messages[1:], strict=False):
                content = message["content"]
                if (
                    message["role"] == "tool"
                    and isinstance(content, list)
                    and get_token_backed_response_ids(before["content"])
                ):
                    message["content"] = [
                        *self._remove_response_separator_overlap(before["content"], content[:1]),
                        *content[1:],
                    ]

        return prepare_inputs

    return replace(Template, "_swift_prepare_inputs", make)


@contextmanager
def no_dynamic_eos(template: Any) -> Iterator[None]:
    """Inside, `template` puts no label on a separator that follows a trained token. SFT wants those; a rollout is trained on what was sampled."""
    template._add_dynamic_eos = lambda *_: None
    try:
        yield
    finally:
        del template._add_dynamic_eos


def exact_tokens() -> str:
    """Fault 3, labels: a rollout is trained on exactly the sampled ids, or the run stops."""
    import swift.rlhf_trainers.grpo_trainer as module

    expect(module.encode_sample, "replace_assistant_response_with_ids(", "template.encode(data, return_length=True)")

    def make(original: Any) -> Any:
        def encode_sample(sample: Any, template: Any, **more: Any) -> dict[str, Any]:
            if not sample.response_token_ids:
                return original(sample, template, **more)  # type: ignore[no-any-return]
            with no_dynamic_eos(template):
                encoded: dict[str, Any] = original(sample, template, **more)
            if not more.get("encode_prompt_only"):
                check_exact(sample, encoded["labels"])
            return encoded

        return encode_sample

    return replace(module, "encode_sample", make)


def check_exact(sample: Any, labels: list[int]) -> None:
    """Raise unless the labels of an encoded rollout are the sampled ids, in order, each with its log-probability."""
    trained = [label for label in labels if label != -100]
    turns = zip(sample.response_token_ids, sample.response_loss_mask, strict=True)
    sampled = [token for ids, mask in turns for token, kept in zip(ids, mask, strict=True) if kept]
    if trained != sampled:
        at = next(
            (i for i, (a, b) in enumerate(zip(trained, sampled, strict=False)) if a != b),
            min(len(trained), len(sampled)),
        )
        raise RuntimeError(
            f"rollout {sample.request_id}: {len(trained)} trained ids are not the {len(sampled)} sampled ids (they part at {at}): "
            "the chat template changed what was sampled, so training on it would teach something else."
        )
    logprobs = sum(len(turn) for turn in sample.rollout_logprobs)
    if logprobs not in (0, len(sampled)):
        raise RuntimeError(f"rollout {sample.request_id}: {logprobs} log-probabilities for {len(sampled)} sampled ids.")


def no_dropout() -> str:
    """An adapter brings the dropout of its SFT. The sampler has none, so each log-probability would differ by chance from the sampled one."""
    from swift.rlhf_trainers.rlhf_mixin import RLHFTrainerMixin

    expect(RLHFTrainerMixin.__init__, "getattr(args, 'disable_dropout', False)", "disable_dropout_in_model(model)")

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            kwargs["args"].disable_dropout = True  # ms-swift has the switch and no flag for it
            original(self, *args, **kwargs)

        return init

    return replace(RLHFTrainerMixin, "__init__", make)


def watch_gap() -> str:
    """A stale or doubled adapter, or a loss that is no number, ends the run instead of training on."""
    import torch
    from swift.rlhf_trainers import GRPOTrainer

    expect(GRPOTrainer.log, "rollout_correction/", "self._metrics[mode].clear()")

    def make(original: Any) -> Any:
        def log(self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
            original(self, logs, start_time)
            reason = broken_metrics(logs, GAP_LIMIT["cuda" if torch.cuda.is_available() else "cpu"])
            if reason:
                raise RuntimeError(f"step {self.state.global_step}: {reason}")

        return log

    return replace(GRPOTrainer, "log", make)


def broken_metrics(logs: dict[str, Any], limit: float) -> str:
    """Why these figures of one step mean that training must stop; empty when they do not."""
    for name in ("loss", "grad_norm"):
        value = logs.get(name)
        if isinstance(value, float) and value != value:
            return f"{name} is not a number, so the weights are lost from here on; lower the learning rate."
    gap = logs.get("rollout_correction/k3_kl")
    if gap is not None and not gap <= limit and logs.get("agent/scored", 1):
        return (
            f"the sampler's log-probabilities differ from the trainer's by {gap:.2g} nats a token (limit {limit}): "
            "vLLM samples from a stale or doubled adapter."
        )
    return ""


def close_sandboxes() -> str:
    """Sandboxes end with the training, also with one that fails. (At interpreter exit it is too late: no thread can be started any more.)"""
    from swift.rlhf_trainers import GRPOTrainer

    def make(original: Any) -> Any:
        def train(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:
                rollouts = getattr(self.multi_turn_scheduler, "rollouts", None)
                if rollouts is not None:
                    asyncio.run(rollouts.close())

        return train

    return replace(GRPOTrainer, "train", make)


PATCHES: Final[dict[str, Callable[[], str]]] = {
    "first base sync": skip_base_sync,
    "adapter tensors": own_adapter_tensors,
    "separator before a tool result": one_separator,
    "trained ids are the sampled ids": exact_tokens,
    "no dropout": no_dropout,
    "only signal teaches": only_scored,
    "needless forward passes": no_needless_forwards,
    "trainer against sampler": watch_gap,
    "validation probes and alarms": validation_probes,
    "sandboxes end with the training": close_sandboxes,
}
