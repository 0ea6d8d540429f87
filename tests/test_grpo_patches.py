"""The fixes of the GRPO path against the real ms-swift and vLLM: one child in the train environment."""

from __future__ import annotations

import pytest

from tests.train_env import provision, run_inside


@pytest.mark.slow  # 30 s: imports torch, ms-swift and vLLM once
def test_the_fixes_hold_in_the_train_environment() -> None:
    provision("smoke")
    run_inside("test_grpo_tokens.py")


@pytest.mark.slow  # 15 s
def test_the_guard_decides_on_real_tensors_inside_the_train_environment() -> None:
    run_inside("test_grpo_guard.py")


@pytest.mark.slow  # 30 s
def test_adapters_on_cpu_are_what_vllm_makes_of_them() -> None:
    run_inside("test_cpu_lora.py")


@pytest.mark.slow  # 15 s
def test_a_common_beginning_passed_once_gives_the_same_outputs_and_gradients() -> None:
    run_inside("test_shared_prefix.py")
