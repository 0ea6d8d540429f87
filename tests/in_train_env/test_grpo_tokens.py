"""Run by tests/test_grpo_patches.py inside the train environment: real ms-swift, real tokenizers, real vLLM classes; no model is trained here."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swift import get_model_processor, get_template
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers import grpo_trainer, rollout_mixin
from swift.rlhf_trainers.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from swift.rollout import agent_loop
from swift.template import Template

from configs.load import load_profile
from training import forwards, patches, patching, rewards, scored

PROFILE = load_profile("smoke", environ={})

UNPATCHED = {
    "encode_sample": grpo_trainer.encode_sample,
    "prepare_inputs": Template._swift_prepare_inputs,
    "request": rollout_mixin.TensorLoRARequest,
}
patches.apply()


@cache
def template() -> Any:
    _, tokenizer = get_model_processor(str(PROFILE.model_path), model_type=PROFILE.model.model_type, load_model=False)
    made = get_template(tokenizer, template_type="chatml", agent_template="hermes")
    made.set_mode("train")
    return made


def ids_of(text: str) -> list[int]:
    return list(template().tokenizer.encode(text, add_special_tokens=False))


def stop() -> int:
    return int(template().tokenizer.convert_tokens_to_ids("<|im_end|>"))


def sample(turns: list[list[int]], results: list[str]) -> GRPOSample:
    """A rollout as ms-swift holds it: `turns` are sampled ids, between them the tool results."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Do it."},
    ]
    for number, turn in enumerate(turns):
        messages.append({"role": "assistant", "content": template().tokenizer.decode(turn)})
        messages += [{"role": "tool", "content": results[number]}] if number < len(turns) - 1 else []
    return GRPOSample(
        messages=messages,
        request_id="r",
        response_token_ids=turns,
        response_loss_mask=[[1] * len(turn) for turn in turns],
        rollout_logprobs=[[-0.5] * len(turn) for turn in turns],
    )


def two_turns() -> GRPOSample:
    first = ids_of('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    return sample([[*first, stop()], [*ids_of("Done."), stop()]], ["exit_code: 0"])


def sampled() -> list[int]:
    return [token for turn in two_turns().response_token_ids for token in turn]


def test_the_trained_ids_are_the_sampled_ids() -> None:
    encoded = grpo_trainer.encode_sample(two_turns(), template())
    assert [label for label in encoded["labels"] if label != -100] == sampled()


def test_without_the_fix_the_stop_token_is_trained_twice() -> None:
    """What the fix is for: fails as soon as ms-swift repairs it, and the patch can go."""
    fixed = Template._swift_prepare_inputs
    Template._swift_prepare_inputs = UNPATCHED["prepare_inputs"]
    try:
        encoded = UNPATCHED["encode_sample"](two_turns(), template())
    finally:
        Template._swift_prepare_inputs = fixed
    trained = [label for label in encoded["labels"] if label != -100]
    assert len(trained) == len(sampled()) + 2
    assert f"{stop()}, {stop()}" in str(encoded["input_ids"])


def test_a_mismatch_of_trained_and_sampled_ids_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match="not the"):
        patches.check_exact(two_turns(), [-100, 5, 6])


def test_missing_log_probabilities_of_one_turn_stop_the_run() -> None:
    broken = two_turns()
    broken.rollout_logprobs = broken.rollout_logprobs[:1]
    with pytest.raises(RuntimeError, match="log-probabilities"):
        grpo_trainer.encode_sample(broken, template())


def test_rollout_tokens_equal_the_sft_rendering_of_the_same_conversation() -> None:
    call = '{"name": "bash", "arguments": {"command": "ls"}}'
    row = {
        "messages": [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "Do it."},
            {"role": "tool_call", "content": call},
            {"role": "tool_response", "content": "exit_code: 0"},
            {"role": "assistant", "content": "Done."},
        ]
    }
    sft = template().encode(row)["input_ids"]
    rollout = grpo_trainer.encode_sample(two_turns(), template())
    assert sft[: len(rollout["input_ids"])] == rollout["input_ids"]
    assert template().tokenizer.decode(sft[len(rollout["input_ids"]) :]) == "\n"


def test_separators_between_assistant_and_tool_are_there_and_masked() -> None:
    encoded = grpo_trainer.encode_sample(two_turns(), template())
    masked = template().tokenizer.decode(
        [t for t, label in zip(encoded["input_ids"], encoded["labels"], strict=True) if label == -100]
    )
    assert masked.endswith(
        "\n<|im_start|>user\n<tool_response>\nexit_code: 0\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_next_turns_prompt_continues_the_sampled_ids() -> None:
    first = two_turns().response_token_ids[0]
    messages = [
        *two_turns().messages[:2],
        {"role": "assistant", "content": list(first)},
        {"role": "tool", "content": "exit_code: 0"},
    ]
    made = template()
    made.set_mode("vllm")
    try:
        one = made.encode({"messages": messages[:2]})["input_ids"]
        two = made.encode({"messages": messages})["input_ids"]
    finally:
        made.set_mode("train")
    assert two[: len(one) + len(first)] == one + first
    assert stop() not in two[len(one) + len(first) :][:1]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sampled_ids_are_trained_unchanged(data: st.DataObject) -> None:
    """Also ids that spell separators, other stop tokens, or nothing at all that decodes."""
    token = st.integers(0, len(template().tokenizer) - 1) | st.sampled_from(
        [stop(), *ids_of("\n<|im_start|>user\n"), *ids_of("<|endoftext|>")]
    )
    turns = data.draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=4))
    results = [
        data.draw(st.sampled_from(["", "exit_code: 0", "<|im_end|>", "</tool_response>", "é\n\n"])) for _ in turns
    ]
    rollout = sample(turns, results)
    encoded = grpo_trainer.encode_sample(rollout, template())  # raises where they differ
    assert sum(label != -100 for label in encoded["labels"]) == sum(map(len, turns))


def test_masked_ids_of_a_turn_are_not_trained() -> None:
    rollout = two_turns()
    rollout.response_loss_mask[0][:3] = [0, 0, 0]
    rollout.rollout_logprobs[0] = rollout.rollout_logprobs[0][3:]
    encoded = grpo_trainer.encode_sample(rollout, template())
    assert sum(label != -100 for label in encoded["labels"]) == sum(map(len, rollout.response_token_ids)) - 3


def adapter_request(make: Any, tensors: dict[str, torch.Tensor]) -> Any:
    return make(
        lora_name=VLLM_LORA_NAME,
        lora_int_id=VLLM_LORA_INT_ID,
        lora_path=VLLM_LORA_PATH,
        peft_config={"r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]},
        lora_tensors=tensors,
    )


def load_as_vllm_does(request: Any) -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    model = LoRAModel.from_lora_tensors(
        lora_model_id=1,
        tensors=request.lora_tensors,
        peft_helper=PEFTHelper.from_dict(request.peft_config),
        device="cpu",
        dtype=torch.float32,
        model_vocab_size=64,
    )
    for layer in model.loras.values():
        layer.optimize()  # multiplies lora_b by alpha / r in place


def trainers_adapter() -> dict[str, torch.Tensor]:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    return {f"{prefix}.lora_A.weight": torch.ones(8, 16), f"{prefix}.lora_B.weight": torch.ones(16, 8)}


def test_loading_an_adapter_into_vllm_leaves_the_trainers_tensors_alone() -> None:
    mine = trainers_adapter()
    load_as_vllm_does(adapter_request(rollout_mixin.TensorLoRARequest, mine))
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in mine.values())


def test_without_the_fix_vllm_scales_the_trainers_own_tensors() -> None:
    """What the fix is for: fails as soon as vLLM or ms-swift copies by itself."""
    mine = trainers_adapter()
    load_as_vllm_does(adapter_request(UNPATCHED["request"], mine))
    assert any(not torch.equal(tensor, torch.ones_like(tensor)) for tensor in mine.values())


def test_every_patch_is_applied_once_only() -> None:
    assert all(line.endswith("already there") for line in patches.apply())


def test_code_that_is_not_the_tested_one_is_refused() -> None:
    with pytest.raises(ValueError, match="reinstall it from the lock"):
        patching.expect(agent_loop.run_multi_turn, "a line that is not there")


class Trainer:
    """The attributes that `_prepare_vllm` and the sync decision read."""

    def __init__(self, **changes: Any) -> None:
        base = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "tuner_type": "lora",
            "sleep_level": 1,
            "vllm_engine_kwargs": {},
        }
        self.args = SimpleNamespace(**{**base, **{k: v for k, v in changes.items() if k in base}})
        self.rollout_enable_lora = changes.get("rollout_enable_lora", True)
        adapter = SimpleNamespace(
            modules_to_save=changes.get("modules_to_save"), use_dora=changes.get("use_dora", False), bias="none"
        )
        self.model = torch.nn.Module()
        self.model.lora_A = torch.nn.Linear(2, 2)
        self.model.peft_config = changes.get("peft_config", {"default": adapter})
        if changes.get("trained_base"):
            self.model.embed = torch.nn.Linear(2, 2)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


@pytest.mark.parametrize(
    ("changes", "load_format", "reason"),
    [
        ({}, "auto", ""),
        ({"vllm_mode": "server"}, "auto", "inside the trainer"),
        ({"tuner_type": "full"}, "auto", "tuner_type lora"),
        ({"rollout_enable_lora": False}, "auto", "vllm_enable_lora"),
        ({"sleep_level": 2}, "auto", "sleep_level 2"),
        ({}, "dummy", "dummy"),
        ({"peft_config": {}}, "auto", "no adapter named default"),
        ({"modules_to_save": ["embed_tokens"]}, "auto", "modules_to_save"),
        ({"use_dora": True}, "auto", "DoRA"),
        ({"trained_base": True}, "auto", "embed.weight"),
    ],
)
def test_the_first_base_sync_is_skipped_only_where_that_is_safe(
    changes: dict[str, Any], load_format: str, reason: str
) -> None:
    found = patches.unsafe_reason(Trainer(**changes), load_format)
    assert (reason in found) if reason else found == ""


def test_a_gap_is_in_no_mean_no_deviation_and_no_advantage() -> None:
    nan = float("nan")
    found = scored.group_advantages(torch.tensor([1.0, 0.0, nan, 1.0]), 4, "group")
    known = torch.tensor([1.0, 0.0, 1.0])
    expected = (known - known.mean()) / (known.std() + 1e-4)
    assert found[2] == 0
    assert torch.allclose(found[[0, 1, 3]], expected, atol=1e-5)


def test_one_different_reward_in_a_group_is_kept() -> None:
    found = scored.group_advantages(torch.tensor([0.0] + [0.95] * 7), 8, "group")
    assert found[0] < -2
    assert (found[1:] > 0.3).all()


@pytest.mark.parametrize(
    "group",
    [[0.3] * 4, [1.0, 1.0, 1.0, 1.0 + 1e-9], [0.1, float("nan"), float("nan"), float("nan")], [float("nan")] * 4],
)
def test_a_group_without_variance_gives_no_gradient(group: list[float]) -> None:
    assert (scored.group_advantages(torch.tensor(group), 4, "group") == 0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=8, max_size=8))
def test_without_gaps_the_advantages_are_ms_swifts(rewards: list[float]) -> None:
    from swift.rl_core.advantage import compute_advantages

    column = torch.tensor(rewards).unsqueeze(1)
    theirs, _ = compute_advantages(column, torch.ones(1), 4)
    assert torch.allclose(scored.group_advantages(torch.tensor(rewards), 4, "group"), theirs, atol=2e-3)


def test_the_mean_reward_of_a_batch_leaves_gaps_out() -> None:
    rewards = torch.tensor([1.0, float("nan"), 0.0, 0.0])
    metrics = grpo_trainer.compute_reward_metrics(rewards, rewards.unsqueeze(1), ["agent_verifier"], 2, "group")
    assert metrics.reward_mean == pytest.approx(0.5)
    assert metrics.per_func_mean["agent_verifier"] == pytest.approx(1 / 3)


def test_a_batch_of_gaps_alone_has_no_mean_reward() -> None:
    rewards = torch.full((4,), float("nan"))
    metrics = grpo_trainer.compute_reward_metrics(rewards, rewards.unsqueeze(1), ["agent_verifier"], 2, "group")
    assert metrics.reward_mean != metrics.reward_mean


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ({"loss": 0.1, "rollout_correction/k3_kl": 1e-8}, ""),
        ({"loss": float("nan")}, "not a number"),
        ({"rollout_correction/k3_kl": 7e-4}, "stale or doubled"),
        ({"rollout_correction/k3_kl": 10.8}, "stale or doubled"),
        ({"rollout_correction/k3_kl": float("nan")}, "stale or doubled"),
        ({"rollout_correction/k3_kl": float("nan"), "agent/scored": 0.0}, ""),
    ],
)
def test_a_sampler_that_left_the_trainer_stops_the_run(logs: dict[str, float], said: str) -> None:
    found = patches.broken_metrics(logs, 1e-4)
    assert (said in found) if said else found == ""


def record(verdict: str) -> dict[str, Any]:
    reason = {
        "trajectory": {"outcome": {"verdict": verdict}, "stop_reason": "finished", "extra": {"well_formed": True}}
    }
    fixed = {"task_id": "t", "task_digest": "d", "family": "file", "agent": "builtin", "model": "m", "attempt": 0}
    return {"trajectory": reason["trajectory"] | fixed, "family": "file", "verdict": verdict}


def step_of(
    values: list[float], folder: Path, micro_batch: int, *, deepspeed: bool = False
) -> tuple[Any, list[dict[str, Any]]]:
    """A trainer after the step in which rollouts got these rewards, in groups of four, and its micro-batches of two tokens a rollout."""
    batches = [
        {
            "grpo_batch": SimpleNamespace(
                completion_mask=torch.ones(micro_batch, 2, dtype=torch.bool),
                num_items_in_batch=torch.tensor(2 * len(values)),
            )
        }
        for _ in range(len(values) // micro_batch)
    ]
    samples = [
        SimpleNamespace(
            rollout_infos=record("passed" if value == value else "not_scored"),
            prompt_id="p",
            request_id=str(number),
            advantages=torch.tensor(0.0),
            encoded={"labels": [-100, 7]},
        )
        for number, value in enumerate(values)
    ]
    trainer = SimpleNamespace(
        _rewards_per_func=torch.tensor(values).unsqueeze(1),
        reward_weights=torch.ones(1),
        num_generations=4,
        loss_type="grpo",
        dynamic_num_samples=False,
        use_liger_loss=False,
        kl_in_reward=False,
        is_deepspeed_enabled=deepspeed,
        compute_entropy=False,
        old_policy=lambda: False,
        _has_teacher_explicit=lambda: False,
        template=SimpleNamespace(sequence_parallel_size=1),
        accelerator=SimpleNamespace(num_processes=1, process_index=0),
        args=SimpleNamespace(output_dir=str(folder)),
        state=SimpleNamespace(global_step=0),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        split_by_mini_batches=lambda rows: [rows[at : at + micro_batch] for at in range(0, len(rows), micro_batch)],
    )
    trainer.passes = []

    def logps(_: Any, __: Any, ___: Any, batch: Any, **____: Any) -> tuple[str, None]:
        trainer.passes.append(next(at for at, mine in enumerate(batches) if mine["grpo_batch"] is batch))
        return "log-probabilities", None

    def prepare(self: Any, _: Any) -> None:
        for batch in batches:
            batch["old"] = forwards._logps(logps)(self, None, None, batch["grpo_batch"])[0]
            batch["reference"] = forwards._logps(logps)(self, None, None, batch["grpo_batch"])[0]

    forwards._prepare(prepare)(trainer, samples)
    scored._mask(lambda *_: None)(trainer, samples, batches)
    return trainer, batches


def loss_over(trainer: Any, batches: list[dict[str, Any]], losses: torch.Tensor) -> torch.Tensor:
    def loss_of(_: Any, __: Any, rows: torch.Tensor, batch: Any) -> tuple[torch.Tensor, None]:
        mask = batch.completion_mask
        return ((rows * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(), None  # ms-swift's `grpo` loss

    model = torch.nn.Linear(1, 1)
    size = len(losses) // len(batches)
    parts = [
        forwards._loss(loss_of)(trainer, model, losses[i * size : (i + 1) * size], batch["grpo_batch"])[0]
        for i, batch in enumerate(batches)
    ]
    return (sum(parts[1:], parts[0]) / len(parts)).detach()


def test_a_rollout_that_was_not_scored_is_in_no_loss_and_no_denominator(tmp_path: Path) -> None:
    """Losses 1, 2, 3 and a gap of 100: the mean must be 2, also where the gap shares a micro-batch with a scored one."""
    losses = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [100.0, 100.0]])
    trainer, batches = step_of([1.0, 0.0, 1.0, float("nan")], tmp_path, micro_batch=2)
    assert float(loss_over(trainer, batches, losses)) == pytest.approx(2.0)
    assert int(batches[0]["grpo_batch"].num_items_in_batch) == 6

    saved = [json.loads(line) for line in (tmp_path / "rollouts" / "rank0.jsonl").read_text().splitlines()]
    assert [row["extra"]["reward"] for row in saved] == [1.0, 0.0, 1.0, None]
    assert [row["extra"]["trained_token_ids"] for row in saved] == [[7], [7], [7], []]


NO_SIGNAL = [1.0, 1.0, 1.0, 1.0]
SIGNAL = [1.0, 0.0, 1.0, 1.0]


def test_a_group_without_signal_gives_no_gradient_and_costs_no_pass(tmp_path: Path) -> None:
    losses = torch.tensor([[float(row)] * 2 for row in range(12)])
    trainer, batches = step_of(NO_SIGNAL + SIGNAL + NO_SIGNAL, tmp_path, micro_batch=4)
    assert [batch["old"] for batch in batches] == [None] * 3  # on-policy: the loss's own pass gives them
    assert [batch["reference"] for batch in batches] == [None, "log-probabilities", None]
    assert float(loss_over(trainer, batches, losses)) == pytest.approx((4 + 5 + 6 + 7) / 4 / 3)
    assert trainer._metrics["train"]["agent/groups_without_signal"] == [2]


def test_rows_without_signal_leave_a_micro_batch_that_has_some(tmp_path: Path) -> None:
    losses = torch.tensor([[float(row)] * 2 for row in range(8)])
    trainer, batches = step_of(NO_SIGNAL + SIGNAL, tmp_path, micro_batch=8)
    assert float(loss_over(trainer, batches, losses)) == pytest.approx((4 + 5 + 6 + 7) / 8)


def test_without_any_signal_the_loss_is_nothing_and_the_sampler_is_still_checked(tmp_path: Path) -> None:
    trainer, batches = step_of(NO_SIGNAL + NO_SIGNAL, tmp_path, micro_batch=4)
    assert trainer.passes == [0]
    assert batches[0]["grpo_batch"].completion_mask.all()
    assert float(loss_over(trainer, batches, torch.ones(8, 2))) == 0.0


def test_several_processes_make_every_pass_and_get_the_same_loss(tmp_path: Path) -> None:
    losses = torch.tensor([[float(row)] * 2 for row in range(8)])
    alone, batches = step_of(NO_SIGNAL + SIGNAL, tmp_path / "alone", micro_batch=4)
    several, theirs = step_of(NO_SIGNAL + SIGNAL, tmp_path / "several", micro_batch=4)
    for batch in theirs:
        batch["grpo_batch"].idle = False  # what it is where other ranks wait
    assert float(loss_over(alone, batches, losses)) == float(loss_over(several, theirs, losses))


def test_deepspeed_sees_every_pass_because_it_counts_them(tmp_path: Path) -> None:
    _, batches = step_of(NO_SIGNAL + SIGNAL, tmp_path, micro_batch=4, deepspeed=True)
    assert [batch["reference"] for batch in batches] == ["log-probabilities"] * 2
    assert not any(batch["grpo_batch"].idle for batch in batches)


def test_the_reward_of_a_rollout_that_was_not_scored_is_none() -> None:
    verifier = rewards.AgentVerifier.__new__(rewards.AgentVerifier)
    verifier.weights = SimpleNamespace(format_reward=0.1, unfinished_reward=0.5)
    assert [verifier.one(record(v)) for v in ("passed", "failed", "not_scored")] == [1.0, 0.1, None]


def test_a_pass_that_the_turn_limit_ended_is_worth_what_the_profile_says() -> None:
    verifier = rewards.AgentVerifier.__new__(rewards.AgentVerifier)
    verifier.weights = SimpleNamespace(format_reward=0.0, unfinished_reward=0.5)
    cut = {v: record(v) for v in ("passed", "failed")}
    for infos in cut.values():
        infos["trajectory"]["stop_reason"] = "max_turns"
    assert [verifier.one(cut[v]) for v in ("passed", "failed")] == [0.5, 0.0]


def test_turning_dropout_off_reaches_the_model() -> None:
    from swift.rlhf_trainers.rlhf_mixin import RLHFTrainerMixin

    class Base:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

    made = type("Trainer", (RLHFTrainerMixin, Base), {"tokenizer": SimpleNamespace(pad_token_id=0)})
    model = torch.nn.Sequential(torch.nn.Dropout(0.1))
    model.model_info = SimpleNamespace(is_moe_model=False)
    args = SimpleNamespace(beta=0.0, router_aux_loss_coef=0)
    made(model, args=args, template=SimpleNamespace(is_encoder_decoder=False))
    assert model[0].p == 0
