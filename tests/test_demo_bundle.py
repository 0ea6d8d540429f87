"""The demo bundle: made from real records of the loop, checked against its schema and against itself, and never half or stale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.episode import Settings, run_episode
from agents.scripted import ScriptedLLM
from agents.store import write_trajectories
from agents.task import load_tasks
from agents.trajectory import Outcome, Trajectory, Verdict
from configs.errors import UserError, WorkFailed
from configs.files import digest_json, write_json, write_jsonl
from configs.load import ROOT, load_profile
from configs.run import Run
from sandboxes.mock import MockBackend
from sandboxes.pool import SandboxPool
from training.bundle import FILES, INFERENCE, REPORT, ROWS, TRAJECTORY, check_bundle
from training.demo import demo
from training.report import build, headline
from training.results import row_of
from training.rows import to_row

PARIS = "The capital of France is Paris."
SFT = digest_json("sft")


async def teach(number: int) -> Trajectory:
    """A real episode of the scripted teacher; the verdict is given, since the mock sandbox runs no Python."""
    task = load_tasks(ROOT / "datasets" / "laptop" / "train.jsonl")[number]

    async def passed(*_: object) -> Outcome:
        return Outcome(verdict=Verdict.PASSED)

    async with SandboxPool(MockBackend(), run_id="r", concurrency=1) as pool:
        return await run_episode(task, ScriptedLLM, pool, Settings(run_id="run-7", grade=passed))


class Inputs:
    """What the steps leave, in files, and the call of the step on them."""

    def __init__(self, folder: Path, episodes: list[Trajectory]) -> None:
        self.profile = load_profile("laptop", flags={"paths.output": folder / "output"}, environ={})
        self.folder, self.out = folder, folder / "demo"
        self.answers: list[dict[str, Any]] = [
            {"policy": "base", "query": "What is the capital of France?", "response": PARIS, "adapter_digest": ""},
            {"policy": "sft", "query": "What is the capital of France?", "response": PARIS, "adapter_digest": SFT},
        ]
        write_trajectories(folder / "t.parquet", episodes)
        write_jsonl(
            folder / "train.jsonl", [row for episode in episodes if (row := to_row(episode, self.profile.model))]
        )
        rows = [row_of(policy, episode) for policy in ("base", "sft") for episode in episodes]
        about = {
            "adapters": {"sft": SFT},
            "versions": {"torch": "2.13.0"},
            "settings": {"temperature": 0.0},
            "model": "m",
        }
        report = build(rows, ("base", "sft"), 1, about)
        write_json(folder / "report.json", {**report, "headline": headline(report["policies"])})

    def make(self) -> Any:
        write_jsonl(self.folder / "inference.jsonl", self.answers)
        names = ("t.parquet", "train.jsonl", "inference.jsonl", "report.json")
        return demo(Run(self.profile, "demo-run"), *(self.folder / name for name in names), self.out)

    def bytes(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.iterdir()}


@pytest.fixture
async def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path, [await teach(0), await teach(3)])


def test_the_bundle_holds_one_rollout_as_it_was_and_as_it_was_trained(inputs: Inputs) -> None:
    result = inputs.make()
    report = check_bundle(inputs.out)
    assert sorted(path.name for path in inputs.out.iterdir()) == sorted(FILES)
    teacher = Trajectory.model_validate_json((inputs.out / TRAJECTORY).read_text())
    assert to_row(teacher, report.model) == json.loads((inputs.out / ROWS).read_text())
    assert teacher.outcome.verdict is Verdict.PASSED
    assert report.inference.answered == {"base": True, "sft": True}
    assert report.checkpoints == {"sft": SFT}
    assert (result.reused, result.summary["answered"]) == (False, {"base": "right", "sft": "right"})


def test_a_bundle_whose_content_is_the_same_is_not_written_again(inputs: Inputs) -> None:
    first = inputs.make()
    stamps = {path: path.stat().st_mtime_ns for path in inputs.out.iterdir()}
    second = inputs.make()
    assert (second.reused, second.digest) == (True, first.digest)
    assert {path: path.stat().st_mtime_ns for path in inputs.out.iterdir()} == stamps


async def test_the_same_rollout_in_another_run_is_the_same_content(inputs: Inputs) -> None:
    """Times and the run's name change each time; they say nothing about what was done."""
    first = inputs.make()
    again = (await teach(0)).model_copy(update={"run_id": "another", "timings": {"total": 99.0}})
    write_trajectories(inputs.folder / "t.parquet", [again])
    assert inputs.make().digest == first.digest


def test_a_wrong_answer_is_reported_as_wrong_and_replaces_the_bundle(inputs: Inputs) -> None:
    inputs.make()
    inputs.answers[1]["response"] = "The capital of France is Lyon."
    assert not inputs.make().reused
    assert check_bundle(inputs.out).inference.answered == {"base": True, "sft": False}


def test_files_that_are_not_ours_stay(inputs: Inputs) -> None:
    inputs.out.mkdir()
    (inputs.out / "README.md").write_text("mine")
    inputs.make()
    assert (inputs.out / "README.md").read_text() == "mine"


def test_a_crash_between_the_renames_leaves_the_old_bundle_to_be_put_back(inputs: Inputs) -> None:
    inputs.make()
    before = inputs.bytes()
    inputs.out.rename(inputs.out.with_name(".demo.old"))
    assert inputs.make().reused
    assert inputs.bytes() == before


def test_a_crash_while_the_new_bundle_is_written_leaves_the_old_one_whole(inputs: Inputs) -> None:
    inputs.make()
    before = inputs.bytes()
    aside = inputs.out.with_name(".demo.new")
    aside.mkdir()
    shutil.copy(inputs.out / TRAJECTORY, aside / TRAJECTORY)
    assert inputs.bytes() == before
    check_bundle(inputs.out)
    inputs.answers[1]["response"] = "Paris, I think."
    inputs.make()
    assert not aside.exists()


def test_answers_of_another_checkpoint_than_the_evaluated_one_are_refused(inputs: Inputs) -> None:
    inputs.make()
    before = inputs.bytes()
    inputs.answers[1]["adapter_digest"] = digest_json("stale")
    with pytest.raises(UserError, match="not the checkpoint that was evaluated"):
        inputs.make()
    assert inputs.bytes() == before


def test_rows_of_another_collection_than_the_trajectories_are_refused(inputs: Inputs) -> None:
    write_jsonl(
        inputs.folder / "train.jsonl", [{"task_digest": "other", "messages": [], "tools": "[]", "task_id": "x"}]
    )
    with pytest.raises(UserError, match="made from none of the trajectories"):
        inputs.make()


def test_a_key_of_the_environment_is_never_published(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """BEHAVIOURS 26."""
    monkeypatch.setenv("LLM_API_KEY", "sk-very-secret-7")
    inputs.answers[1]["response"] = "my key is sk-very-secret-7"
    with pytest.raises(WorkFailed, match="LLM_API_KEY") as raised:
        inputs.make()
    assert "very-secret" not in str(raised.value)
    assert not inputs.out.exists()


def test_a_path_of_this_machine_is_never_published(inputs: Inputs) -> None:
    inputs.answers[1]["response"] = f"see {ROOT}/data"
    with pytest.raises(WorkFailed, match="path"):
        inputs.make()


def edit(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads(
            (folder / name).read_text().splitlines()[0] if name != REPORT else (folder / name).read_text()
        )
        change(value)
        (folder / name).write_text(json.dumps(value) + "\n")

    return apply


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing file": (lambda d: (d / INFERENCE).unlink(), "inference.jsonl is missing"),
    "a cut line": (lambda d: (d / ROWS).write_text((d / ROWS).read_text()[:-30]), "line 1: not JSON"),
    "an unknown key": (edit(INFERENCE, lambda v: v.update(note="x")), "does not follow its schema.*note"),
    "a changed row": (edit(ROWS, lambda v: v["messages"].pop()), "is not the file that"),
    "a failed teacher": (edit(TRAJECTORY, lambda v: v["outcome"].update(verdict="failed")), "is not the file that"),
    "figures that do not add up": (
        edit(REPORT, lambda v: v["evaluation"]["policies"][0].update(passes=1)),
        "1 of 2 is not",
    ),
    "an answer called right": (
        edit(REPORT, lambda v: v["inference"]["answered"].update(sft=False)),
        "does not say what",
    ),
    "a path in the report": (
        edit(REPORT, lambda v: v["versions"].update(torch="/opt/venv/torch")),
        "holds the path '/opt/venv/torch'",
    ),
    "another version": (edit(REPORT, lambda v: v.update(bundle_version=9)), "of version 9"),
    "a checkpoint more": (
        edit(REPORT, lambda v: v["checkpoints"].update(grpo="0" * 64)),
        "the evaluation is of base, sft",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_bundle_with_a_fault_is_refused_by_what_is_wrong(inputs: Inputs, what: str) -> None:
    inputs.make()
    damage, sentence = BROKEN[what]
    damage(inputs.out)
    with pytest.raises(UserError, match=sentence):
        check_bundle(inputs.out)


def test_the_bundle_in_the_repository_follows_its_schema_and_itself() -> None:
    """Written by `run.sh all`, `run.sh demo` and `create-demo` only."""
    check_bundle(ROOT / "datasets" / "demo")
