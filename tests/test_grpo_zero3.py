"""The reference topology, whole, on a laptop: two torchrun processes, ZeRO-3, vLLM colocate, LoRA sync, sandbox rollouts, verifier reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.trajectory import Trajectory, Verdict
from configs.files import read_jsonl
from configs.load import ROOT
from configs.run import Layout, Run
from sandboxes.registry import make_for
from tests.grpo_kit import start
from training import grpo
from training.checkpoints import broken
from training.rollout import rank_run_id
from training.validation import validation_tasks

COLLAPSING = ROOT / "tests" / "in_train_env" / "collapsing_plugin.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any, Path]:
    """One GRPO run from an adapter that is not zero, with probes of seven tasks on two ranks; it is ended after step 2 of 3. About 120 s."""
    flags: dict[str, Any] = {"grpo.validation": "datasets/laptop/validation.jsonl", "grpo.probe_tasks": 7}
    flags |= {"grpo.max_steps": 3, "grpo.extra": {"external_plugins": [str(COLLAPSING)]}}
    run, rows, adapter = start(tmp_path_factory.mktemp("zero3"), "smoke-zero3", **flags)
    return run, grpo.grpo(run, rows, adapter), adapter


def rollouts(result: Any) -> list[Trajectory]:
    files = sorted(result.outputs["rollouts"].glob("rank*.jsonl"))
    assert [file.name for file in files] == ["rank0.jsonl", "rank1.jsonl"]
    return [Trajectory.model_validate(row) for file in files for row in read_jsonl(file)]


@pytest.mark.slow
def test_two_processes_train_one_adapter_under_zero3(trained: tuple[Run, Any, Path]) -> None:
    run, result, _ = trained
    assert [row["step"] for row in read_jsonl(result.outputs["metrics"])] == [1.0, 2.0]
    assert broken(result.outputs["adapter"]) is None
    assert broken(result.folder / "checkpoint-2", resumable=True) is None
    log = run.log("grpo").read_text()
    assert "first base sync: applied" in log
    assert "skipped; vLLM has loaded the same base" in log


@pytest.mark.slow
def test_what_was_trained_is_what_was_sampled(trained: tuple[Run, Any, Path]) -> None:
    found = rollouts(trained[1])
    assert len(found) == 8
    for rollout in found:
        sampled = [token for turn in rollout.turns for token in turn.token_ids or []]
        assert rollout.extra["trained_token_ids"] == sampled
        assert sum(len(turn.logprobs or []) for turn in rollout.turns) == len(sampled)
        assert all(len(turn.loss_mask or []) == len(turn.token_ids or []) for turn in rollout.turns)


@pytest.mark.slow
def test_every_rollout_was_graded_and_grouped(trained: tuple[Run, Any, Path]) -> None:
    found = rollouts(trained[1])
    assert all(rollout.outcome.verdict is not Verdict.NOT_SCORED for rollout in found), [
        r.outcome.reason for r in found
    ]
    groups: dict[str, list[Trajectory]] = {}
    for rollout in found:
        groups.setdefault(rollout.extra["group"], []).append(rollout)
    assert all(len(group) == 4 and len({rollout.task_id for rollout in group}) == 1 for group in groups.values())
    assert {rollout.extra["step"] for rollout in found} == {1, 2}


@pytest.mark.slow
def test_sampler_and_trainer_agree_also_after_the_second_sync(trained: tuple[Run, Any, Path]) -> None:
    gaps = [row["rollout_correction/log_ppl_abs_diff"] for row in read_jsonl(trained[1].outputs["metrics"])]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4  # the adapter's dropout alone would give more


@pytest.mark.slow
def test_two_ranks_share_the_validation_tasks(trained: tuple[Run, Any, Path]) -> None:
    result = trained[1]
    probes = read_jsonl(result.outputs["probes"])
    assert [(probe["step"], probe["tasks"], probe["scored"]) for probe in probes] == [(0, 7, 7), (1, 7, 7), (2, 7, 7)]
    played = read_jsonl(result.outputs["rollouts"] / "probes.jsonl")
    rows = read_jsonl(result.folder / "validation.jsonl")
    assert {row["task_id"] for row in rows} == {task.id for task in validation_tasks(trained[0].profile)}
    assert [row["task_id"] for row in played] == [row["task_id"] for row in rows] * 3
    assert {(row["extra"]["mode"], row["extra"]["step"]) for row in played} == {("probe", step) for step in (0, 1, 2)}
    assert all(row["turns"] and "advantage" not in row["extra"] for row in played)


@pytest.mark.slow
def test_a_collapse_ends_the_training_and_the_best_checkpoint_is_the_result(trained: tuple[Run, Any, Path]) -> None:
    run, result, _ = trained
    assert result.outputs["adapter"] == result.folder / "checkpoint-1"
    assert (result.summary["steps"], result.summary["best_step"]) == (2, 1)
    assert "from 7 of 7 after step 1 to 0 of 7 after step 2" in result.summary["collapsed"]
    notes = [event["note"] for event in read_jsonl(run.folder / "events.jsonl") if "note" in event]
    assert "probe after step 1: 7 of 7" in notes
    assert any(note.startswith("training ends after step 2: validation fell") for note in notes)


@pytest.mark.slow
async def test_no_sandbox_of_the_run_is_left(trained: tuple[Run, Any, Path]) -> None:
    run, _, _ = trained
    backend = make_for(run.profile.sandboxes)
    assert [await backend.sweep(rank_run_id(run.run_id, rank)) for rank in range(2)] == [0, 0]


@pytest.mark.slow
def test_the_same_run_again_is_reused_and_says_so(trained: tuple[Run, Any, Path]) -> None:
    run, result, adapter = trained
    again = grpo.grpo(run, Layout(run.profile).rl_rows, adapter)
    assert (again.reused, again.digest) == (True, result.digest)
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "progress" and "gap" in event for event in events)
