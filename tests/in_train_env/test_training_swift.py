"""Run by tests/test_training_swift.py inside the train environment: the flags of every profile, and the tokenizer's check, on the real ms-swift."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from swift.arguments import DeployArguments, RLHFArguments, SftArguments
from transformers import HfArgumentParser

from agents.task import Task, Verifier
from agents.tools import schemas
from configs.files import read_jsonl, write_jsonl
from configs.load import load_profile, shipped
from training import encode
from training.arguments import Job, deploy_command, grpo_command, infer_command, sft_command
from training.launch import Command
from training.rows import prompt_row

PROFILE = load_profile("smoke", environ={})
TOOLS = schemas(("bash", "write_file"))
PARSERS = {"sft": SftArguments, "grpo": RLHFArguments, "infer": DeployArguments, "deploy": DeployArguments}


@cache
def parser(step: str) -> Any:
    return HfArgumentParser(PARSERS[step])


def flags(command: Command) -> list[str]:
    return command.argv[
        next(i for i, word in enumerate(command.argv) if word.startswith(("swift.cli.", "training.ask"))) + 1 :
    ]


@pytest.mark.parametrize("step", PARSERS)
@pytest.mark.parametrize("name", shipped())
def test_ms_swift_knows_every_flag_of_every_profile_and_takes_its_value(name: str, step: str) -> None:
    p, path = load_profile(name, environ={}), Path("/somewhere")
    job = Job(p, rows=path, output=path, adapter=path, adapters={"sft": path}, port=8000)
    build = {"sft": sft_command, "grpo": grpo_command, "infer": infer_command, "deploy": deploy_command}[step]
    known, unknown = parser(step).parse_known_args(flags(build(job)))  # parses types and choices; starts nothing
    assert unknown == []
    assert known.model_type == p.model.model_type
    if step in ("sft", "grpo"):
        assert known.output_dir == "/somewhere"
        assert known.bf16 is not p.on_cpu
    if step == "grpo":
        assert known.ref_adapters == (["/somewhere"] if p.grpo.beta else [])
        assert known.external_plugins[-1].endswith("grpo_plugin.py")


def test_ms_swift_refuses_a_flag_that_it_does_not_know() -> None:
    assert parser("sft").parse_known_args(["--no_such_flag", "1"])[1] == ["--no_such_flag", "1"]


@cache
def encoder() -> encode.Encoder:
    model = PROFILE.model
    return encode.Encoder(
        str(PROFILE.model_path), model.model_type, model.template, model.agent_template, model.thinking
    )


def task(number: int = 0) -> Task:
    return Task(id=f"t{number}", prompt=f"Create file{number}.py that prints hi.", verifier=Verifier(command="true"))


def start(number: int = 0, tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return prompt_row(task(number), TOOLS if tools is None else tools, PROFILE.model)


def call(**arguments: Any) -> dict[str, str]:
    return {"role": "tool_call", "content": json.dumps({"name": "write_file", "arguments": arguments})}


def row(number: int = 0, *turns: dict[str, str]) -> dict[str, Any]:
    turns = turns or (
        call(path=f"file{number}.py", content="print('hi')\n"),
        {"role": "tool_response", "content": "exit_code: 0"},
        {"role": "assistant", "content": "Done."},
    )
    made = start(number)
    return {**made, "messages": [*made["messages"], *turns]}


def examine(
    kind: encode.Kind, *rows: dict[str, Any], limit: int = 1024, others: tuple[Any, ...] = ()
) -> dict[str, Any]:
    kept, report = encode.examine(encoder(), kind, list(rows), limit, list(others))
    return {"kept": len(kept), **{reason: count for reason, count in report["dropped"].items() if count}}


def text(ids: list[int]) -> str:
    return str(encoder().template.tokenizer.decode(ids))


def test_the_start_of_an_sft_row_and_of_a_rollout_of_the_same_task_are_the_same_tokens() -> None:
    ids, labels = encoder().row(row())
    prompt = encoder().prompt(start())
    assert ids[: len(prompt)] == prompt
    assert all(label == -100 for label in labels[: len(prompt)])
    assert labels[len(prompt)] != -100
    assert text(prompt).endswith("<|im_start|>assistant\n")
    assert json.dumps(TOOLS[0]) in text(prompt)
    assert examine("sft", row(), others=(start(),)) == {"kept": 1}


def test_only_what_the_model_says_is_trained() -> None:
    ids, labels = encoder().row(row())
    trained = text([token for token, label in zip(ids, labels, strict=True) if label != -100])
    assert trained.startswith("<tool_call>\n")
    assert "Done.<|im_end|>" in trained
    assert "exit_code" not in trained
    assert "<tool_response>" in text(ids)


def test_parallel_calls_of_a_turn_are_one_turn() -> None:
    both = row(0, call(path="a", content="1"), call(path="b", content="2"), {"role": "tool_response", "content": "A"},
               {"role": "tool_response", "content": "B"}, {"role": "assistant", "content": "Done."})  # fmt: skip
    ids, _ = encoder().row(both)
    said = text(ids).split("<|im_start|>assistant\n")
    assert len(said) == 3
    assert said[1].count("</tool_call>") == 2
    assert said[1].count("<tool_response>") == 2


def test_other_tools_make_another_prompt_and_nothing_is_trained() -> None:
    fewer = start(0, TOOLS[:1])
    assert examine("sft", row(0), row(1), others=(fewer,)) == {"kept": 1, encode.OTHER_PROMPT: 1}
    assert examine("rl", start(0), start(1), others=(row(0), row(1))) == {"kept": 2}
    assert examine("rl", fewer, others=(row(0),)) == {"kept": 0, encode.OTHER_PROMPT: 1}


def test_a_row_without_a_trainable_token_or_longer_than_the_limit_is_dropped_with_its_reason() -> None:
    length = len(encoder().row(row())[0])
    assert examine("sft", row(), limit=length) == {"kept": 1}
    assert examine("sft", row(), limit=length - 1) == {"kept": 0, encode.TOO_LONG: 1}
    assert examine("sft", start(0), row(1)) == {"kept": 1, encode.NOTHING_TRAINED: 1}  # a prompt without an answer


def test_a_row_that_the_template_refuses_is_dropped_and_named() -> None:
    bad = row(0, {"role": "tool_call", "content": "not JSON"}, {"role": "assistant", "content": "Done."})
    kept, report = encode.examine(encoder(), "sft", [bad, row(1)], 1024, [])
    assert len(kept) == 1
    assert report["named"][encode.UNREADABLE][0].startswith("line 1 (t0): ")


def test_the_child_writes_the_kept_rows_and_its_report(tmp_path: Path) -> None:
    model = PROFILE.model
    write_jsonl(tmp_path / "rows.jsonl", [row(0), row(1)])
    flags = f"--kind sft --limit 1024 --model {PROFILE.model_path} --model_type {model.model_type} --template {model.template}"
    flags += f" --agent_template {model.agent_template} --thinking none"
    for name in ("rows", "out", "report"):
        flags += f" --{name} {tmp_path / name}.json" + "l" * (name != "report")
    assert encode.main(flags.split()) == 0
    assert read_jsonl(tmp_path / "out.jsonl") == [row(0), row(1)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["kept"]) == (2, 2)
    assert 0 < report["trained_tokens"] < report["tokens"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
