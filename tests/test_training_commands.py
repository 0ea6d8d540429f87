"""What ms-swift is told for each shipped profile, and what a dry run shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.load import ROOT, load_profile, shipped
from configs.profile import Profile
from configs.run import Layout
from training.arguments import (
    DEPLOY,
    GRPO,
    INFER,
    MODEL,
    SFT,
    TRAIN,
    Job,
    deploy_command,
    grpo_command,
    infer_command,
    sft_command,
    words,
)
from training.environment import VARIABLES
from training.launch import Command, render

GOLDEN = Path(__file__).parent / "golden"


def profile(name: str, **flags: object) -> Profile:
    return load_profile(name, environ={}, flags={key.replace("__", "."): value for key, value in flags.items()})


def commands(p: Profile) -> dict[str, Command]:
    layout = Layout(p)
    adapter = layout.sft / "v0-20260101-000000" / "checkpoint-4"
    rows, queries = layout.sft_rows, layout.infer / "v0-20260101-000000" / "queries.jsonl"
    return {
        "sft": sft_command(Job(p, rows=rows, output=layout.sft / "v0-20260101-000000")),
        "grpo": grpo_command(Job(p, rows=layout.rl_rows, output=layout.grpo / "v0-20260101-000000", adapter=adapter)),
        "infer": infer_command(
            Job(p, rows=queries, output=queries.with_name("answers") / "base.jsonl", adapters={"sft": adapter})
        ),
        "deploy": deploy_command(Job(p, adapters={"sft": adapter}, port=8123, concurrency=p.evaluate.concurrency)),
    }


def value(command: Command, flag: str) -> str | None:
    return command.argv[command.argv.index(f"--{flag}") + 1] if f"--{flag}" in command.argv else None


@pytest.mark.parametrize("name", shipped())
def test_the_command_and_environment_of_each_profile_are_the_golden_ones(name: str) -> None:
    # Set GOLDEN=write to accept a change; the diff of tests/golden is what a reviewer reads.
    text = "\n".join(f"# {step}\n{render(command)}" for step, command in commands(profile(name)).items()).replace(
        str(ROOT), "<root>"
    )
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_two_processes_on_cpu_train_together() -> None:
    p = profile("smoke-zero3")
    for command in (commands(p)["sft"], commands(p)["grpo"]):
        assert (value(command, "use_cpu"), value(command, "ddp_backend"), value(command, "nproc_per_node")) == (
            "true",
            "gloo",
            "2",
        )
        assert "training/plugins/cpu_plugin.py" in " ".join(command.argv)
    assert value(commands(profile("smoke"))["sft"], "ddp_backend") is None


def test_a_cpu_profile_never_asks_for_half_precision_and_a_gpu_profile_does() -> None:
    for name in shipped():
        p = profile(name)
        command = sft_command(Job(p))
        assert value(command, "torch_dtype") == ("float32" if p.on_cpu else "bfloat16")
        assert value(command, "bf16") == ("false" if p.on_cpu else "true")
        assert value(command, "fp16") == ("false" if p.on_cpu else None)
        assert value(command, "gradient_checkpointing") == ("false" if p.on_cpu else "true")


def test_the_reference_is_told_what_the_hardware_notes_promise() -> None:
    grpo = commands(profile("qwen3.8-27b-4gpu"))["grpo"]
    promised = {
        "nproc_per_node": "4",
        "lora_rank": "8",
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": "0.25",
        "vllm_max_model_len": "2048",
        "vllm_max_num_seqs": "2",
        "vllm_tensor_parallel_size": "4",
        "sleep_level": "1",
        "offload_model": "true",
        "offload_optimizer": "true",
        "move_model_batches": "16",
        "enable_thinking": "false",
        "bf16": "true",
    }
    assert {flag: value(grpo, flag) for flag in promised} == promised
    assert str(value(grpo, "deepspeed")).endswith("configs/deepspeed/zero3.json")


def test_the_kl_is_to_the_adapter_that_grpo_starts_from_also_when_resumed() -> None:
    p, adapter = profile("laptop"), Path("/a/checkpoint-6")
    fresh = grpo_command(Job(p, adapter=adapter))
    assert (value(fresh, "adapters"), value(fresh, "ref_adapters")) == (str(adapter), str(adapter))
    resumed = grpo_command(Job(p, adapter=adapter, resume=Path("/g/checkpoint-2")))
    assert (value(resumed, "adapters"), value(resumed, "ref_adapters")) == (None, str(adapter))
    assert value(resumed, "resume_from_checkpoint") == "/g/checkpoint-2"
    assert value(grpo_command(Job(profile("laptop", grpo__beta=0.0), adapter=adapter)), "ref_adapters") is None
    assert value(grpo_command(Job(p)), "ref_adapters") is None


def test_without_vllm_no_vllm_flag_is_given() -> None:
    command = grpo_command(Job(profile("smoke", rollout__engine="transformers")))
    assert value(command, "use_vllm") == "false"
    assert not [
        word for word in command.argv if word.startswith("--vllm") or word in ("--sleep_level", "--offload_model")
    ]


def test_extra_arguments_come_last_and_replace_ours_once() -> None:
    p = profile("smoke", sft__extra={"learning_rate": 5e-5, "lorap_lr_ratio": 16})
    argv = sft_command(Job(p)).argv
    assert argv[-4:] == ["--learning_rate", "5e-05", "--lorap_lr_ratio", "16"]
    assert argv.count("--learning_rate") == 1


def test_epochs_count_only_where_no_number_of_steps_is_given() -> None:
    assert value(sft_command(Job(profile("smoke"))), "num_train_epochs") is None
    by_epochs = load_profile("smoke", environ={"EPOCHS": "3"})
    assert (
        value(sft_command(Job(by_epochs)), "num_train_epochs"),
        value(sft_command(Job(by_epochs)), "max_steps"),
    ) == ("3.0", None)


def test_a_deepspeed_file_that_is_missing_is_named() -> None:
    from training import arguments

    p = profile("smoke")
    odd = p.model_copy(update={"hardware": p.hardware.model_copy(update={"deepspeed": "zero9"})})
    with pytest.raises(UserError, match=r"zero9\.json"):
        arguments.sft_command(Job(odd))
    for name in ("zero2", "zero3", "zero3_offload"):
        assert json.loads((ROOT / "configs" / "deepspeed" / f"{name}.json").read_text())["zero_optimization"][
            "stage"
        ] in (2, 3)


def test_only_grpo_rollouts_on_e2b_are_given_its_key_and_no_trainer_the_llms() -> None:
    ours = {"E2B_API_KEY": "e2b-1", "LLM_API_KEY": "sk-1", "PATH": "/bin"}
    for backend, expected in (("e2b", {"grpo"}), ("local", set())):
        given = commands(profile("laptop", sandboxes__backend=backend))
        assert {step for step, command in given.items() if "E2B_API_KEY" in command.environment(ours)} == expected
        assert not [step for step, command in given.items() if "sk-1" in command.environment(ours).values()]


def test_a_rendered_command_masks_every_secret() -> None:
    ours = {"E2B_API_KEY": "e2b-1", "PASSWORD": "pw", "MY_SECRET": "s3", "PLAIN": "yes"}
    text = render(Command(["/bin/python", "-m", "x", "--flag", "a b"], ours, secrets=("HF_TOKEN",)))
    assert not [word for word in ("e2b-1", "pw", "s3") if word in text]
    assert "PLAIN=yes" in text
    assert "HF_TOKEN=***" in text
    assert "--flag 'a b'" in text


def test_every_flag_is_named_once_in_its_tables() -> None:
    for tables in ([*MODEL, *TRAIN, *SFT], [*MODEL, *TRAIN, *GRPO], [*MODEL, *INFER], [*MODEL, *DEPLOY]):
        names = [flag.name for flag in tables]
        assert len(names) == len(set(names))
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)
    assert words([], Job(profile("smoke")), {"a": {"b": 1}, "c": None}) == ["--a", '{"b": 1}']


def test_commands_are_built_without_any_heavy_library() -> None:
    heavy = "torch swift vllm prefect litellm e2b transformers deepspeed pyarrow"
    code = f"import sys, training.sft, training.infer, training.encode; print([m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
