"""The GRPO plugin without the fix of fault 2: vLLM scales the trainer's own adapter in place at every synchronisation."""

import swift.rlhf_trainers.rollout_mixin as mixin
from swift.rlhf_trainers.utils import TensorLoRARequest

import training.plugins.grpo_plugin  # noqa: F401

mixin.TensorLoRARequest = TensorLoRARequest
