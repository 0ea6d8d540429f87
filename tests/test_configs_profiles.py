"""Profiles: what is shipped is valid, precedence holds, and a mistake is named with file, key, value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.errors import UserError
from configs.load import PROFILES, choose, dump_profile, load_profile, require_keys, shipped
from configs.profile import Profile


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_profile_is_valid_and_survives_a_round_trip(name: str) -> None:
    profile = load_profile(name, environ={})
    assert profile.name == name
    assert Profile.model_validate(yaml.safe_load(dump_profile(profile))) == profile


def test_the_reference_profile_says_what_the_reference_run_used() -> None:
    p = load_profile("qwen3.8-27b-4gpu", environ={})
    assert (p.hardware.nproc, p.hardware.deepspeed, p.lora.rank, p.sft.epochs, p.grpo.epochs) == (4, "zero3", 8, 2, 2)
    r = p.rollout
    assert (r.engine, r.gpu_memory_utilization, r.max_model_len, r.max_num_seqs, r.tensor_parallel) == (
        "vllm",
        0.25,
        2048,
        2,
        4,
    )
    assert (r.sleep_level, r.offload_model, r.offload_optimizer) == (1, True, True)
    assert (p.sandboxes.backend, p.model.id) == ("e2b", "Qwen/Qwen3.8-27B")


def test_a_flag_beats_the_environment_which_beats_the_profile() -> None:
    assert load_profile("laptop", environ={}).collect.concurrency == 4
    assert load_profile("laptop", environ={"CONCURRENCY": "7"}).collect.concurrency == 7
    assert (
        load_profile("laptop", environ={"CONCURRENCY": "7"}, flags={"collect.concurrency": 9}).collect.concurrency == 9
    )


def test_grpo_plays_its_own_tasks_and_tasks_from_the_command_line_take_the_place_of_both(tmp_path: Path) -> None:
    laptop, mine = load_profile("laptop", environ={}), tmp_path / "mine.jsonl"
    assert [file.name for file in laptop.trained_tasks] == ["train.jsonl", "rl.jsonl"]
    assert laptop.rl_tasks.is_absolute()
    given = load_profile("laptop", environ={}, flags={"collect.tasks": str(mine)})
    assert given.trained_tasks == (mine,)
    assert load_profile("laptop", environ={}, flags={"grpo.tasks": str(mine)}).trained_tasks == (
        laptop.collect.tasks,
        mine,
    )
    stored = tmp_path / "profile.yaml"
    stored.write_text(dump_profile(given))
    assert load_profile(stored, environ={}) == given


@pytest.mark.parametrize("text", ["", "0"])
def test_empty_or_zero_omp_threads_become_one(text: str) -> None:
    assert load_profile("laptop", environ={"OMP_NUM_THREADS": text}).hardware.omp_threads == 1


def test_epochs_in_the_environment_replace_the_profiles_steps() -> None:
    p = load_profile("laptop", environ={"EPOCHS": "3"})
    assert (p.sft.epochs, p.sft.max_steps, p.grpo.epochs, p.grpo.max_steps) == (3, None, 3, None)


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        ({"MAX_TURNS": "0"}, {}, ["MAX_TURNS=0", "collect.max_turns", "greater than or equal to 1"]),
        ({"EPOCHS": "0"}, {}, ["EPOCHS=0", "sft.epochs", "greater than 0"]),
        ({"CONCURRENCY": "many"}, {}, ["CONCURRENCY='many'", "whole number"]),
        ({}, {"grpo.num_generations": 1}, ["grpo.num_generations", "greater than or equal to 2", "got 1"]),
        ({}, {"sft.bogus": 3}, ["sft.bogus", "no such key"]),
        ({}, {"grpo.num_generations": 3}, ["multiple of num_generations 3"]),
        ({"VLLM_TP": "3", "NPROC_PER_NODE": "4"}, {}, ["VLLM_TP", "must divide"]),
        ({}, {"rollout.sleep_level": 2}, ["rollout.sleep_level"]),
        ({}, {"grpo.format_reward": 0.6}, ["unfinished_reward 0.5", "must not beat a pass"]),
        ({"EPOCHS": "inf"}, {}, ["EPOCHS=inf", "sft.epochs", "finite"]),
        ({"OMP_NUM_THREADS": "9" * 20}, {}, ["hardware.omp_threads", "1024"]),
        ({"LLM_BASE_URL": "nonsense"}, {}, ["LLM_BASE_URL=nonsense", "teacher.base_url"]),
        ({"LLM_MODEL": " "}, {}, ["LLM_MODEL= ", "teacher.llm"]),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(
    environ: dict[str, str], flags: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        load_profile("laptop", environ=environ, flags=flags)
    for word in words:
        assert word in str(refusal.value)


def test_a_mistake_in_a_file_names_the_file_the_key_and_the_value(tmp_path: Path) -> None:
    raw = yaml.safe_load((PROFILES / "laptop.yaml").read_text())
    raw["sft"]["batch_size"] = "four"
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError, match=r"mine\.yaml: sft\.batch_size: .*got 'four'"):
        load_profile(file, environ={})


def test_an_unknown_profile_is_answered_with_the_list() -> None:
    with pytest.raises(UserError, match="laptop"):
        load_profile("desktop", environ={})


@pytest.mark.parametrize(("gpus", "name"), [(0, "laptop"), (1, "one-gpu"), (4, "qwen3.8-27b-4gpu")])
def test_the_hardware_chooses_the_profile(gpus: int, name: str) -> None:
    assert choose(gpus) == name


def test_another_number_of_gpus_asks_for_the_profile() -> None:
    with pytest.raises(UserError, match="--profile"):
        choose(3)


def test_a_profile_without_its_keys_names_what_to_export() -> None:
    reference = load_profile("qwen3.8-27b-4gpu", environ={})
    with pytest.raises(UserError, match=r"LLM_API_KEY.*E2B_API_KEY"):
        require_keys(reference, teacher=True, sandboxes=True, environ={})
    require_keys(reference, teacher=True, sandboxes=True, environ={"LLM_API_KEY": "a", "E2B_API_KEY": "b"})
    require_keys(load_profile("laptop", environ={}), teacher=True, sandboxes=True, environ={})


def test_the_llm_model_of_the_environment_brings_its_default_address() -> None:
    p = load_profile("laptop", environ={"LLM_MODEL": "deepseek-chat"})
    assert (p.teacher.llm, p.teacher.base_url) == ("deepseek-chat", "https://api.deepseek.com/v1")
    assert (
        load_profile("laptop", environ={"LLM_MODEL": "m", "LLM_BASE_URL": "http://localhost:1/v1"}).teacher.base_url
        == "http://localhost:1/v1"
    )


def test_what_stands_at_an_unknown_key_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((PROFILES / "laptop.yaml").read_text().replace("teacher:", "teacher:\n  api_key: marked-secret"))
    with pytest.raises(UserError, match=r"teacher\.api_key") as refusal:
        load_profile(file, environ={})
    assert "marked-secret" not in str(refusal.value)


def test_an_empty_tensor_parallel_counts_as_unset() -> None:
    p = load_profile("qwen3.8-27b-4gpu", environ={"VLLM_TP": "", "NPROC_PER_NODE": "2"})
    assert p.rollout.tensor_parallel == 2
