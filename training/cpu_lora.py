"""Adapters in vLLM on CPU as two matrix products for each run of tokens of one adapter, instead of a copy of the adapter for each token.

vLLM 0.32's CPU path gathers A and B once per token, which costs more than the base model itself, and gives tokens without an adapter (index -1) the
last one loaded when both are in one batch. `benchmarks/cpu_lora.py` measures the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from training.patching import expect, replace


def matrix_products() -> str:
    """Patch vLLM's CPU adapter layer in this process. vLLM itself calls it in each of its processes: it is a plugin (training/plugins/)."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as Wrapper

    expect(Wrapper.add_shrink, "self._apply_shrink(y[slice_idx], x, lora_a_stacked[slice_idx], scale)")
    expect(Wrapper.add_expand, "self._apply_expand(", "add_inputs=add_inputs")
    expect(Wrapper.add_lora_linear, "torch.zeros((x.size(0), r)", "add_inputs=True")
    expect(Wrapper.add_lora_logits, "self.sampler_indices, scale)", "self.sampler_indices, add_inputs=True)")
    done = replace(Wrapper, "update_metadata", _update)
    replace(Wrapper, "_apply_shrink", lambda _: shrink)
    replace(Wrapper, "_apply_expand", lambda _: expand)
    replace(Wrapper, "add_lora_logits", lambda _: logits)
    return done


def _update(original: Callable[..., None]) -> Callable[..., None]:
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.runs = runs(self.token_lora_indices.tolist())
        self.sampled = runs(self.sampler_indices.tolist())

    return update


def runs(indices: list[int]) -> list[tuple[int, int, int]]:
    """(start, end, adapter) of neighbouring tokens with the same adapter; tokens without one (-1) are left out."""
    starts = [at for at, index in enumerate(indices) if at == 0 or indices[at - 1] != index]
    ends = [*starts[1:], len(indices)]
    return [(start, end, indices[start]) for start, end in zip(starts, ends, strict=True) if indices[start] >= 0]


def shrink(self: Any, y: Any, x: Any, weights: Any, scale: float) -> None:
    """`y = scale · x Aᵀ`; x: [tokens, in], weights: [adapters, 1, rank, in], y: [tokens, rank], zero where there is no adapter."""
    for start, end, index in self.runs:
        y[start:end] = (x[start:end] @ weights[index, 0].T).to(y.dtype) * scale


def expand(self: Any, y: Any, x: Any, weights: Any, offset: int, size: int, add_inputs: bool = True) -> None:
    """`y[:, offset:offset + size] += x Bᵀ`; x: [tokens, rank], weights: [adapters, 1, size, rank]."""
    for start, end, index in self.runs:
        target = y[start:end, offset : offset + size]
        product = x[start:end].to(y.dtype) @ weights[index, 0].T
        target.copy_(target + product if add_inputs else product)


def logits(self: Any, y: Any, x: Any, a: Any, b: Any, scale: float, **_: Any) -> None:
    """`y += scale · x Aᵀ Bᵀ` for the rows that are sampled from; y: [rows, vocabulary and padding], b: [adapters, 1, vocabulary, rank]."""
    width = min(y.shape[-1], b.shape[2])
    for start, end, index in self.sampled:
        y[start:end, :width] += (x[start:end] @ a[index, 0].T * scale @ b[index, 0].T)[:, :width].to(y.dtype)
