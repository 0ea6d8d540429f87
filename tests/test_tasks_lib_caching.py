"""When a step's result may be reused, and which failures deserve another try."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import light_steps
import pytest

from configs.errors import UserError, WorkFailed
from configs.files import write_atomic
from configs.load import load_profile
from configs.manifest import MANIFEST, NotProved, asking
from configs.run import Run, new_run
from sandboxes.base import SandboxError, SandboxGone, SandboxUnavailable
from tasks_lib.caching import prove, request_digest
from tasks_lib.policy import Interrupted, transient
from tasks_lib.steps import using


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    flags = {f"paths.{name}": str(tmp_path / name) for name in ("data", "models", "output", "demo")}
    write_atomic(tmp_path / "rows.jsonl", "{}\n")
    with using(light_steps.TABLE):
        yield new_run(load_profile("smoke", flags=flags, environ={}))


def test_asking_makes_nothing_and_says_why(run: Run, tmp_path: Path) -> None:
    with asking(), pytest.raises(NotProved, match="has not been made yet"):
        light_steps.sft(run, tmp_path / "rows.jsonl")
    assert prove("sft", run, {"rows": tmp_path / "rows.jsonl"}) is None
    assert not (run.folder / "events.jsonl").exists()


def test_what_was_made_is_proved_until_its_input_changes(run: Run, tmp_path: Path) -> None:
    made = light_steps.sft(run, tmp_path / "rows.jsonl")
    found = prove("sft", run, {"rows": tmp_path / "rows.jsonl"})
    assert found is not None
    assert found.reused
    assert (found.outputs, found.digest) == (made.outputs, made.digest)
    write_atomic(tmp_path / "rows.jsonl", "{}\n{}\n")
    assert prove("sft", run, {"rows": tmp_path / "rows.jsonl"}) is None


@pytest.mark.parametrize("gone", [MANIFEST, "metrics.jsonl", "checkpoint-4", "checkpoint-4/adapter.bin"])
def test_a_result_without_one_of_its_files_is_not_proved(run: Run, tmp_path: Path, gone: str) -> None:
    made = light_steps.sft(run, tmp_path / "rows.jsonl")
    path = made.folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert prove("sft", run, {"rows": tmp_path / "rows.jsonl"}) is None


def test_a_forced_step_is_never_proved(run: Run, tmp_path: Path) -> None:
    light_steps.sft(run, tmp_path / "rows.jsonl")
    forced = Run(run.profile, run.run_id, force=frozenset({"sft"}))
    assert prove("sft", forced, {"rows": tmp_path / "rows.jsonl"}) is None


def test_a_mistake_found_while_asking_is_left_to_the_run_itself(run: Run, tmp_path: Path) -> None:
    from tasks_lib.steps import Entry

    with using({"sft": Entry("training.sft:sft")}):
        assert prove("sft", run, {"rows": tmp_path / "missing.jsonl"}) is None


def test_two_requests_are_one_only_when_step_profile_and_arguments_are(run: Run, tmp_path: Path) -> None:
    other = Run(run.profile.model_copy(update={"seed": 7}), run.run_id)
    requests = [
        request_digest("sft", run, {"rows": tmp_path}),
        request_digest("grpo", run, {"rows": tmp_path}),
        request_digest("sft", run, {"rows": tmp_path / "other"}),
        request_digest("sft", other, {"rows": tmp_path}),
    ]
    assert len(set(requests)) == 4
    assert request_digest("sft", run, {"rows": tmp_path}) == requests[0]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (SandboxError("hiccup"), True),
        (SandboxGone("died"), True),
        (SandboxUnavailable("no bubblewrap"), False),
        (httpx.ConnectError("refused"), True),
        (httpx.ReadTimeout("slow"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (Interrupted("crashed"), True),
        (UserError("a typo"), False),
        (WorkFailed("exit code 1"), False),
        (ValueError("a bug"), False),
        (OSError(28, "No space left on device"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(error: BaseException, again: bool) -> None:
    assert transient(error) is again
