"""Memory arithmetic of a profile: what each card holds while training, and which knob to turn first.

Counted per card, in GiB: the trainer's weights (sharded by ZeRO-3), LoRA with gradients and Adam states (16 bytes a parameter: float32 master,
gradient and two moments), vLLM's share, and, on CPU where vLLM takes what it needs, its copy of the weights. LoRA is counted once the model's
config.json is there. Not counted: activations, CUDA
context and fragmentation, which grow with `max_length` × `batch_size`; the reference run peaked at about 88 GiB a card with them.
"""

from __future__ import annotations

import json
from typing import Final

from pydantic import BaseModel

from configs.errors import UserError
from configs.profile import Profile

GIB: Final = 1024**3

KNOWN_PARAMETERS: Final = {
    "Qwen/Qwen3.8-27B": 27e9,
    "Qwen/Qwen3-4B-Instruct-2507": 4.02e9,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5e6,
}
"""Where the model is not downloaded yet."""

BYTES: Final = {True: 4, False: 2}
"""Bytes of a weight: float32 on CPU, bfloat16 on GPU."""

KNOBS: Final = "a smaller base model, then shorter rollout.max_model_len and model.max_length, fewer grpo.num_generations, lower precision"


class Budget(BaseModel):
    profile: str
    cards: int
    memory_gib: float
    parts: dict[str, float]
    """GiB of each part on one card."""
    total: float
    fits: bool
    advice: str


def parameters(profile: Profile) -> float:
    """Parameters of the base model, from its files where they are there. Raises `KeyError` naming the model where neither is known."""
    index = profile.model_path / "model.safetensors.index.json"
    whole = profile.model_path / "model.safetensors"
    if index.is_file():
        return float(json.loads(index.read_text())["metadata"]["total_size"]) / BYTES[profile.on_cpu]
    if whole.is_file():
        return float(whole.stat().st_size) / BYTES[profile.on_cpu]
    return KNOWN_PARAMETERS[profile.model.id]


def lora_parameters(profile: Profile) -> int:
    """Trainable parameters of LoRA on every linear layer of a dense decoder: rank × (in + out) each; 0 before the model is downloaded."""
    file = profile.model_path / "config.json"
    if not file.is_file():
        return 0
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        c = config.get("text_config", config)
        hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"{file}: is not a decoder's configuration ({error}); bring the model again: python scripts/download_model.py"
        ) from None
    head = c.get("head_dim") or hidden // c["num_attention_heads"]
    query, key = head * c["num_attention_heads"], head * c.get("num_key_value_heads", c["num_attention_heads"])
    attention = (hidden + query) + 2 * (hidden + key) + (query + hidden)
    return int(profile.lora.rank * layers * (attention + 3 * (hidden + inner)))


def plan(profile: Profile, memory_gb: float) -> Budget:
    """The budget of one card (or of the machine, on CPU) with `memory_gb` GB of memory."""
    try:
        count = parameters(profile)
    except KeyError:
        raise UserError(
            f"the size of {profile.model.id} is not known before it is downloaded: python scripts/download_model.py --profile {profile.name}"
        ) from None
    world = profile.hardware.nproc * profile.hardware.nnodes
    weight = count * BYTES[profile.on_cpu] / GIB
    sharded = profile.hardware.deepspeed in ("zero3", "zero3_offload")
    copies = world if profile.on_cpu else 1
    lora = lora_parameters(profile) * 16 / GIB
    memory = memory_gb * 1e9 / GIB
    vllm = (
        (weight * copies if profile.on_cpu else profile.rollout.gpu_memory_utilization * memory)
        if profile.rollout.engine == "vllm"
        else 0.0
    )
    parts = {
        "trainer weights": weight * copies / (world if sharded else 1),
        "LoRA, gradients and Adam": lora * copies / (world if profile.hardware.deepspeed != "none" else 1),
        "vLLM": vllm,
    }
    total = sum(parts.values())
    needs = weight / profile.rollout.tensor_parallel
    starved = profile.rollout.engine == "vllm" and not profile.on_cpu and needs > vllm
    fits = total < 0.9 * memory and not starved
    if starved:
        advice = f"vLLM's share of {vllm:.1f} GiB cannot hold {needs:.1f} GiB of weights a card: raise VLLM_TP or VLLM_GPU_MEMORY_UTILIZATION"
    else:
        advice = "fits, before activations" if fits else f"does not fit; turn, in this order: {KNOBS}"
    return Budget(
        profile=profile.name,
        cards=1 if profile.on_cpu else world,
        memory_gib=memory,
        parts=parts,
        total=total,
        fits=fits,
        advice=advice,
    )


def render(budget: Budget) -> str:
    """The budget as lines for a person."""
    lines = [f"{name:<26} {size:8.2f} GiB" for name, size in budget.parts.items()]
    return "\n".join(
        [
            f"{budget.profile}: one of {budget.cards} with {budget.memory_gib:.1f} GiB",
            *lines,
            f"{'sum':<26} {budget.total:8.2f} GiB",
            budget.advice,
        ]
    )
