"""rl-prepare and the grpo command: pure parts, no train environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.prompts import initial_messages
from agents.task import Task, Verifier, load_tasks
from agents.tools import schemas
from configs.errors import UserError
from configs.files import read_jsonl
from configs.load import ROOT, load_profile
from configs.run import Layout, Run
from training import grpo, validation


def run(tmp_path: Path, name: str = "smoke", **flags: Any) -> Run:
    paths = {"paths.output": str(tmp_path / "output"), "paths.data": str(tmp_path / "data")}
    return Run(load_profile(name, flags={**paths, **flags}, environ={}), "test")


def tasks(**families: int) -> list[Task]:
    check = Verifier(command="test -f SECRET-CHECK", files={"hidden.py": "HIDDEN"})
    return [
        Task(id=f"{family}-{n}", family=family, prompt=f"Do {family} {n}.", verifier=check)
        for family, count in families.items()
        for n in range(count)
    ]


def test_families_take_turns_and_a_larger_one_is_spread_over_the_whole() -> None:
    order = [task.family for task in grpo.interleaved(tasks(a=4, b=4, c=8), seed=1)]
    assert all({"a", "b", "c"} == set(order[start : start + 4]) for start in (0, 4, 8, 12))
    assert sorted(order) == ["a"] * 4 + ["b"] * 4 + ["c"] * 8


def test_the_order_of_prompts_depends_on_the_seed_alone() -> None:
    some = tasks(a=6, b=6)
    assert grpo.interleaved(some, 1) == grpo.interleaved(some, 1) != grpo.interleaved(some, 2)


def test_a_prompt_row_shows_the_model_the_prompt_and_the_tools_and_nothing_hidden() -> None:
    profile = load_profile("smoke", environ={})
    (row,) = grpo.prompt_rows(profile, tasks(a=1))
    assert row["messages"] == [{"role": m.role, "content": m.content} for m in initial_messages(tasks(a=1)[0])]
    assert json.loads(row["tools"]) == schemas(profile.collect.tools)
    assert "HIDDEN" not in json.dumps([row["messages"], row["tools"]])
    assert Task.model_validate_json(row["task"]) == tasks(a=1)[0]


def test_every_value_of_a_row_is_text_except_the_messages() -> None:
    """Arrow mixes the types of nested columns (ms-swift #10125)."""
    rows = grpo.prompt_rows(load_profile("smoke", environ={}), load_tasks(ROOT / "datasets/laptop/train.jsonl"))
    assert {type(value) for row in rows for key, value in row.items() if key != "messages"} == {str}
    assert len(rows) == 64


def test_the_grpo_command_names_profile_run_rows_and_adapter(tmp_path: Path) -> None:
    made = grpo.command(run(tmp_path, "smoke-zero3"), Path("/rows.jsonl"), Path("/adapter"))
    text = " ".join(made.argv)
    assert made.env["AGENTEXECUTOR_RUN_PROFILE"] == str(tmp_path / "output" / "test" / "profile.yaml")
    assert made.env["AGENTEXECUTOR_RUN_ID"] == "test"
    for words in (
        "-m swift.cli.rlhf --",
        "--rlhf_type grpo",
        "--dataset /rows.jsonl",
        "--adapters /adapter",
        "--ref_adapters /adapter",
        "--nproc_per_node 2",
    ):
        assert words in text
    assert not any("KEY" in name for name in made.env)


def test_missing_prompts_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl-prepare|download_model"):
        grpo.grpo(run(tmp_path), tmp_path / "none.jsonl", None)


def test_what_was_made_after_the_last_checkpoint_is_taken_back_on_resume(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    lines = [json.dumps({"extra": {"step": step}}) for step in (1, 1, 2, 3)]
    (folder / "rank0.jsonl").write_text("\n".join(lines) + '\n{"extra": {"st')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1.0, "reward": 0.5}\n{"step": 2.0, "reward": 0.6}\n{"step": 3.0, "reward": 0.7}\n'
    )
    validation.forget_after(tmp_path, 2)
    assert [row["extra"]["step"] for row in read_jsonl(folder / "rank0.jsonl")] == [1, 1, 2]


def test_concurrency_and_paths_do_not_change_what_a_result_depends_on(tmp_path: Path) -> None:
    one, two = run(tmp_path / "a"), run(tmp_path / "b", **{"collect.concurrency": 9, "grpo.save_steps": 7})
    assert grpo.settings(one.profile) == grpo.settings(two.profile)
    assert grpo.settings(one.profile) != grpo.settings(run(tmp_path, **{"grpo.beta": 0.5}).profile)
    assert Layout(one.profile).grpo != Layout(two.profile).grpo
