"""When ms-swift's first copy of the base weights into vLLM can be left out: the one rule, used at run time and written into ms-swift by patch-swift.

With LoRA and `vllm_enable_lora`, ms-swift sends the whole base model to vLLM before the first rollout, because its flag `base_sync_done` starts
false, although vLLM has just loaded the same files. Under ZeRO-3 that gathers every parameter; on CPU it fails. Standard library only, and this
function refers to nothing outside itself: `patch_swift` copies its source.
"""

from __future__ import annotations

from typing import Any


def unsafe_reason(trainer: Any, load_format: str) -> str:
    """Why the first full sync of `trainer` must stay, in words; empty when vLLM is certain to hold the trainer's base weights already."""
    args = trainer.args
    if not args.use_vllm or args.vllm_mode != "colocate":
        return "vLLM does not run inside the trainer"
    if args.tuner_type != "lora" or not getattr(trainer, "rollout_enable_lora", False):
        return "it needs tuner_type lora and vllm_enable_lora"
    if args.sleep_level == 2:
        return "sleep_level 2 discards vLLM's base weights"
    if load_format == "dummy":
        return "load_format dummy means that vLLM never loaded the weights"
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapter = (getattr(model, "peft_config", None) or {}).get("default")
    if adapter is None:
        return "the model has no adapter named default"
    if (
        getattr(adapter, "modules_to_save", None)
        or getattr(adapter, "use_dora", False)
        or getattr(adapter, "bias", "none") != "none"
    ):
        return "the adapter changes base modules (modules_to_save, DoRA or bias)"
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora_" not in name]
    if trained:
        return f"base parameters are trained too ({trained[0]})"
    return ""
