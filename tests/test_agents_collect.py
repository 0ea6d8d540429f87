"""The collect step: reuse, one failure costs one episode, a bad key stops all, a kill leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agents_kit import task

from agents.collect import collect
from agents.fake_llm import FakeLLM
from agents.store import load_trajectories, read_episode, write_episode
from agents.task import Task, Verifier
from agents.trajectory import Outcome, StopReason, Verdict
from configs.errors import UserError, WorkFailed
from configs.files import write_jsonl
from configs.load import ROOT, load_profile
from configs.manifest import StepResult
from configs.run import Layout, Progress, Run, new_run

TRAIN = ROOT / "datasets" / "laptop" / "train.jsonl"


def run_in(
    tmp_path: Path, seen: list[Progress] | None = None, force: frozenset[str] = frozenset(), **flags: Any
) -> Run:
    base = {"paths.data": tmp_path / "data", "paths.output": tmp_path / "output", "sandboxes.backend": "mock"}
    profile = load_profile("laptop", flags={**base, **flags}, environ={})
    return new_run(profile, report=(seen if seen is not None else []).append, force=force)


def tasks_file(tmp_path: Path, *tasks: Task) -> Path:
    path = tmp_path / "tasks.jsonl"
    write_jsonl(path, [which.model_dump(mode="json", exclude_defaults=True) for which in tasks])
    return path


def many(count: int) -> list[Task]:
    return [task(f"t{n}", path=f"f{n}.txt") for n in range(count)]


def counts(result: StepResult) -> dict[str, int]:
    return {key: result.summary[key] for key in ("passed", "failed", "not_scored", "reused")}


def test_episodes_are_collected_counted_and_reused(tmp_path: Path) -> None:
    file, seen = tasks_file(tmp_path, *many(5)), []
    run = run_in(tmp_path, seen, **{"collect.samples_per_task": 2})
    first = collect(run, file)
    assert counts(first) == {"passed": 10, "failed": 0, "not_scored": 0, "reused": 0}
    assert (seen[-1].done, seen[-1].total, seen[-1].metrics) == (10, 10, {"pass_rate": 1.0})
    rows = load_trajectories(first.outputs["trajectories"])
    assert [(row.task_id, row.attempt) for row in rows] == [(f"t{n}", a) for n in range(5) for a in range(2)]
    again = collect(run_in(tmp_path, **{"collect.samples_per_task": 2}), file)
    assert (again.reused, again.digest) == (True, first.digest)
    wider = collect(run_in(tmp_path, **{"collect.samples_per_task": 3, "collect.concurrency": 1}), file)
    assert counts(wider) == {"passed": 15, "failed": 0, "not_scored": 0, "reused": 10}
    forced = collect(run_in(tmp_path, force=frozenset({"collect"}), **{"collect.samples_per_task": 3}), file)
    assert counts(forced)["reused"] == 0


def test_behaviour_2_one_of_eight_costs_one_row_and_is_collected_again_by_the_next_call(tmp_path: Path) -> None:
    broken = task("t3", path="f3.txt", setup=["false"])
    file = tasks_file(tmp_path, *many(3), broken, *many(8)[4:])
    first = collect(run_in(tmp_path), file)
    assert counts(first) == {"passed": 7, "failed": 0, "not_scored": 1, "reused": 0}
    assert first.summary["pass_rate"] == 1.0
    assert list(first.summary["not_scored_because"]) == ["sandbox: set-up of task t3 failed: 'false' exited 1: "]
    rows = load_trajectories(first.outputs["trajectories"])
    assert [row.outcome.verdict for row in rows].index(Verdict.NOT_SCORED) == 3
    again = collect(run_in(tmp_path), file)
    assert (again.reused, counts(again)) == (False, {"passed": 7, "failed": 0, "not_scored": 1, "reused": 7})


def test_a_collection_in_which_nothing_could_be_scored_fails_and_keeps_its_episodes(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match="none of 1 episodes could be scored"):
        collect(run_in(tmp_path), tasks_file(tmp_path, task(setup=["false"])))
    assert len(list((tmp_path / "data" / "episodes").rglob("*.json"))) == 1


def test_a_changed_task_or_tool_is_collected_again_and_a_renamed_task_is_not(tmp_path: Path) -> None:
    collect(run_in(tmp_path), tasks_file(tmp_path, *many(2)))
    renamed, changed = (
        many(1)[0].model_copy(update={"id": "new-name"}),
        task("t1", path="f1.txt", prompt="Create f1.txt now."),
    )
    second = collect(run_in(tmp_path), tasks_file(tmp_path, renamed, changed))
    assert counts(second)["reused"] == 1
    assert load_trajectories(second.outputs["trajectories"])[0].task_id == "new-name"
    third = collect(
        run_in(tmp_path, **{"collect.tools": ["write_file", "bash"]}), tasks_file(tmp_path, renamed, changed)
    )
    assert counts(third)["reused"] == 0


def test_behaviour_25_a_damaged_episode_is_named_set_aside_and_the_others_are_kept(tmp_path: Path) -> None:
    seen: list[Progress] = []
    file = tasks_file(tmp_path, *many(3))
    collect(run_in(tmp_path), file)
    run = run_in(tmp_path, seen)
    hurt, foreign = sorted(Layout(run.profile).episodes.rglob("*.json"))[:2]
    hurt.write_text(hurt.read_text()[:100])
    foreign.write_text("{}")
    (tmp_path / "data" / "manifest.json").unlink()
    assert counts(collect(run, file)) == {"passed": 3, "failed": 0, "not_scored": 0, "reused": 1}
    assert hurt.with_suffix(".damaged").read_text() == hurt.with_suffix(".damaged").read_text()[:100]
    assert read_episode(hurt).outcome.verdict is Verdict.PASSED
    assert sum("is damaged" in progress.note for progress in seen) == 2
    assert str(hurt) in (run.folder / "events.jsonl").read_text()


def test_behaviour_25_a_truncated_task_line_is_named_and_nothing_is_run(tmp_path: Path) -> None:
    file = tasks_file(tmp_path, *many(2))
    file.write_text(file.read_text()[:-20])
    with pytest.raises(UserError, match=r"tasks\.jsonl, line 2"):
        collect(run_in(tmp_path), file)
    assert not (tmp_path / "data" / "episodes").exists()


def test_behaviour_25_a_data_folder_that_cannot_be_written_stops_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "episodes").write_text("a file where the folder should be")
    with pytest.raises(WorkFailed, match="cannot be written") as caught:
        collect(run_in(tmp_path), tasks_file(tmp_path, *many(4)))
    assert "\n" not in str(caught.value)


def test_not_scored_and_cancelled_episodes_are_never_reused(tmp_path: Path) -> None:
    file = tasks_file(tmp_path, *many(2))
    run = run_in(tmp_path)
    episodes = Layout(run.profile).episodes
    first = load_trajectories(collect(run, file).outputs["trajectories"])[0]
    lost = first.model_copy(
        update={"stop_reason": StopReason.CANCELLED, "outcome": Outcome(verdict=Verdict.NOT_SCORED)}
    )
    write_episode(episodes, lost)
    (tmp_path / "data" / "manifest.json").unlink()
    assert counts(collect(run_in(tmp_path), file))["reused"] == 1


def test_the_codex_agent_and_a_missing_key_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLM_API_KEY", raising=False)
    file = tasks_file(tmp_path, *many(1))
    with pytest.raises(UserError, match="codex agent is not part of this version"):
        collect(run_in(tmp_path, **{"teacher.agent": "codex"}), file)
    with pytest.raises(UserError, match="LLM_API_KEY is not set"):
        collect(run_in(tmp_path, **{"teacher.llm": "deepseek-chat"}), file)
    with pytest.raises(UserError, match="no reference solution"):
        collect(run_in(tmp_path), tasks_file(tmp_path, task(solution=[])))


async def served(
    tmp_path: Path, faults: dict[int, str], count: int = 6
) -> tuple[StepResult | UserError, FakeLLM, Path]:
    """Collect against a provider, in a thread, as a Prefect task does."""
    tasks = many(count)
    file = tasks_file(tmp_path, *tasks)
    async with FakeLLM(tasks, faults=faults) as server:
        flags = {"teacher.llm": "some-model", "teacher.base_url": server.url, "collect.concurrency": 2}
        try:
            result: StepResult | UserError = await asyncio.to_thread(collect, run_in(tmp_path, **flags), file)
        except UserError as error:
            result = error
    return result, server, file


async def test_behaviour_21_a_bad_key_stops_the_whole_collection_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_API_KEY", "sk-for-the-tests-0123456789")
    result, server, _ = await served(tmp_path, dict.fromkeys(range(5, 99), "401"), count=20)
    assert isinstance(result, UserError)
    assert "bad_key" in str(result)
    assert len(server.requests) <= 7  # four good answers, then at most one bad one of each worker
    kept = list((tmp_path / "data" / "episodes").rglob("*.json"))
    assert 1 <= len(kept) <= 2
    retried, _, _ = await served(tmp_path, {}, count=20)
    assert isinstance(retried, StepResult)
    assert retried.summary["reused"] == len(kept)


def with_key(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"sk-for-the-tests" in path.read_bytes()]


async def test_behaviours_24_and_26_a_provider_of_unknown_price_costs_null_and_its_key_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_API_KEY", "sk-for-the-tests-0123456789")
    result, _, _ = await served(tmp_path, {3: "500"})
    assert isinstance(result, StepResult)
    assert (result.summary["passed"], result.summary["cost_usd"]) == (6, None)
    assert result.summary["tokens"] > 0
    assert with_key(tmp_path) == []


SLOW = """
import sys
from pathlib import Path
from configs.load import load_profile
from configs.run import new_run
from agents.collect import collect

root = Path(sys.argv[1])
flags = {"paths.data": root / "data", "paths.output": root / "output", "sandboxes.backend": "local", "collect.concurrency": 3}
collect(new_run(load_profile("laptop", flags=flags, environ={}), run_id="killed"), root / "tasks.jsonl")
"""


def descendants(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of every thread
        found += [int(child) for child in children.read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_behaviours_3_and_19_a_killed_collection_leaves_no_sandbox_and_resumes_with_the_others(
    tmp_path: Path, how: signal.Signals
) -> None:
    sleepy = [task(f"s{n}", path=f"s{n}.txt", setup=["sleep 300"]) for n in range(3)]
    tasks = [*many(4), *sleepy]
    tasks_file(tmp_path, *tasks)
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=dict(os.environ),
    )
    try:
        ends = time.monotonic() + 60
        while len(list((tmp_path / "data").rglob("episodes/*/*.json"))) < 4 or len(descendants(child.pid)) < 6:
            assert time.monotonic() < ends, child.poll()
            time.sleep(0.05)
        below = descendants(child.pid)
        child.send_signal(how)
        code = child.wait(timeout=30)
    finally:
        if child.poll() is None:
            child.kill()
    assert code == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}[how]
    ends = time.monotonic() + 15
    while any(alive(pid) for pid in below):
        assert time.monotonic() < ends, "a sandbox outlived the collection"
        time.sleep(0.05)
    awake = [which.model_copy(update={"setup": []}) for which in sleepy]
    flags = {"sandboxes.backend": "local", "collect.concurrency": 3}
    result = collect(run_in(tmp_path, **flags), tasks_file(tmp_path, *many(4), *awake))
    assert counts(result) == {"passed": 7, "failed": 0, "not_scored": 0, "reused": 4}


def test_the_shipped_sample_task_passes_in_a_real_sandbox_by_the_scripted_teacher(tmp_path: Path) -> None:
    result = collect(run_in(tmp_path, **{"sandboxes.backend": "local"}), ROOT / "datasets" / "sample_tasks.jsonl")
    assert counts(result) == {"passed": 1, "failed": 0, "not_scored": 0, "reused": 0}
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["step"] == "collect"


def test_a_task_whose_solution_is_wrong_is_a_failed_episode_and_not_an_error(tmp_path: Path) -> None:
    wrong = task("w", verifier=Verifier(command="test -f other.txt"))
    assert counts(collect(run_in(tmp_path), tasks_file(tmp_path, wrong, *many(1)))) == {
        "passed": 1,
        "failed": 1,
        "not_scored": 0,
        "reused": 0,
    }
