"""Our adapter layer of vLLM on CPU against vLLM's own, on the same tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_expand_slice, bgmv_shrink

from training import cpu_lora

ADAPTERS, RANK, WIDTH, SLICE = 3, 4, 10, 6


def layer(indices: list[int]) -> Any:
    return SimpleNamespace(runs=cpu_lora.runs(indices), sampled=cpu_lora.runs(indices))


@settings(deadline=None)
@given(st.lists(st.integers(0, ADAPTERS - 1), min_size=1, max_size=20))
def test_tokens_with_adapters_get_what_vllm_gives_them(indices: list[int]) -> None:
    torch.manual_seed(0)
    chosen = torch.tensor(indices)
    x, a, b = torch.randn(len(indices), 8), torch.randn(ADAPTERS, 1, RANK, 8), torch.randn(ADAPTERS, 1, SLICE, RANK)
    theirs, ours = torch.zeros(2, len(indices), RANK)
    bgmv_shrink(x, a, theirs, chosen, 0.5)
    cpu_lora.shrink(layer(indices), ours, x, a, 0.5)
    assert torch.allclose(ours, theirs, atol=1e-5)

    out = torch.randn(len(indices), WIDTH)
    theirs_out, ours_out = out.clone(), out.clone()
    bgmv_expand_slice(theirs, b, theirs_out, chosen, 3, SLICE, True)
    cpu_lora.expand(layer(indices), ours_out, ours, b, 3, SLICE, True)
    assert torch.allclose(ours_out, theirs_out, atol=1e-5)

    scores = torch.randn(len(indices), WIDTH)  # a vocabulary of 6, padded to 10
    theirs_scores, ours_scores = scores.clone(), scores.clone()
    bgmv_expand(theirs, b, theirs_scores, chosen, True)
    cpu_lora.logits(layer(indices), ours_scores, x, a, b, 0.5)
    assert torch.allclose(ours_scores, theirs_scores, atol=1e-5)


def test_a_token_without_an_adapter_is_left_alone_also_beside_one_that_has_one() -> None:
    """vLLM's own path gives it the last adapter, because its index is -1."""
    x, a, b = torch.ones(3, 8), torch.ones(ADAPTERS, 1, RANK, 8), torch.ones(ADAPTERS, 1, SLICE, RANK)
    hidden, out = torch.zeros(3, RANK), torch.zeros(3, WIDTH)
    cpu_lora.shrink(layer([-1, 2, -1]), hidden, x, a, 1.0)
    cpu_lora.expand(layer([-1, 2, -1]), out, hidden, b, 0, SLICE)
    assert out[0].abs().sum() == 0 == out[2].abs().sum()
    assert out[1, :SLICE].min() > 0


def test_vllm_finds_the_plugin_in_every_process_of_a_cpu_profile() -> None:
    assert [found.value for found in entry_points(group="vllm.general_plugins") if found.name == "agentexecutor"] == [
        "training.cpu_lora:matrix_products"
    ]
    program = (
        "import json; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as W;"
        "print(json.dumps([getattr(getattr(W, name), '_agentexecutor', False) for name in ('_apply_shrink', '_apply_expand', 'add_lora_logits')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout.splitlines()[-1]) == [True] * 3, done.stderr[-2000:]
