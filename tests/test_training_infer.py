"""The infer step around its child, a stand-in here: one start for all policies, and what it leaves out is said. test_training_swift.py has the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_evaluate_step import make_adapter, safetensors

from configs.errors import UserError, WorkFailed
from configs.files import read_jsonl
from configs.load import load_profile
from configs.run import Layout, Progress, Run
from training.infer import infer

CHILD = """
import json, os, sys
def flag(name):
    start = sys.argv.index("--" + name) + 1
    end = next((i for i in range(start, len(sys.argv)) if sys.argv[i].startswith("--")), len(sys.argv))
    return sys.argv[start:end]
with open(os.environ["STARTS"], "a") as file:
    file.write("started\\n")
rows = [json.loads(line) for line in open(flag("val_dataset")[0])]
out = flag("result_path")[0]
for name in ["base", *(item.split("=")[0] for item in flag("adapters"))]:
    print("asking " + name, flush=True)
    if name == os.environ.get("MISSING"):
        continue
    kept = rows[:-1] if name == os.environ.get("SHORT") else rows
    with open(os.path.join(os.path.dirname(out), name + ".jsonl"), "w") as file:
        file.writelines(json.dumps({"response": f"{name} says {len(row['messages'])}"}) + "\\n" for row in kept)
"""

Told = list[Progress]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, dict[str, Path], Path, Told]:
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    safetensors(model / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": [8, 8]})
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    (tmp_path / "child.py").write_text(CHILD)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "child.py"} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    flags = {
        "paths.output": tmp_path / "output",
        "paths.models": tmp_path / "models",
        "paths.train_python": python,
        "model.folder": "tiny",
    }
    told: Told = []
    run = Run(load_profile("smoke", flags=flags, environ={}), "test-run", told.append)
    adapters = {"sft": make_adapter(tmp_path / "v0" / "checkpoint-2"), "queries": make_adapter(tmp_path / "v1" / "c")}
    return run, adapters, tmp_path, told


def test_one_child_answers_for_the_base_and_every_adapter(asked: tuple[Run, dict[str, Path], Path, Told]) -> None:
    run, adapters, folder, told = asked
    questions = folder / "q.jsonl"
    questions.write_text('{"query": "One?"}\n{"messages": [{"role": "user", "content": "Two?"}]}\n')
    result = infer(run, adapters, queries=questions)
    rows = read_jsonl(result.outputs["inference"])
    assert [(row["policy"], row["query"], row["response"]) for row in rows] == [
        (name, query, f"{name} says 1") for name in ("base", "sft", "queries") for query in ("One?", "Two?")
    ]
    assert (folder / "starts").read_text() == "started\n"
    assert [p.note for p in told if p.note.startswith("asking")] == ["asking base", "asking sft", "asking queries"]
    assert result.summary["peak_memory_gib"] >= 0
    assert infer(run, adapters, queries=questions).reused


def test_a_policy_that_did_not_answer_everything_is_named(
    asked: tuple[Run, dict[str, Path], Path, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, adapters, _, _ = asked
    monkeypatch.setenv("SHORT", "sft")
    with pytest.raises(WorkFailed, match="sft answered 0 of 1 queries"):
        infer(run, adapters)
    monkeypatch.setenv("MISSING", "queries")
    with pytest.raises(WorkFailed, match=r"exit code 0, but .*queries\.jsonl is missing"):
        infer(run, adapters)
    assert not list(Layout(run.profile).infer.glob("v*/manifest.json"))


def test_an_adapter_that_cannot_be_named_to_ms_swift_is_refused_before_anything_starts(
    asked: tuple[Run, dict[str, Path], Path, Told],
) -> None:
    run, adapters, folder, _ = asked
    with pytest.raises(UserError, match="cannot be called 'base'"):
        infer(run, {"base": adapters["sft"]})
    assert not (folder / "starts").exists()
