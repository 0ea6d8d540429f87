"""The pipeline in one process against a real Prefect server, on light steps that write real manifests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import light_steps
import pytest

from configs.errors import UserError, WorkFailed
from configs.files import digest_file, exclusive, write_atomic
from configs.load import dump_profile, load_profile
from configs.manifest import StepResult
from configs.run import Layout
from tasks_lib.server import connected
from tasks_lib.steps import using

pytestmark = pytest.mark.slow  # 20–40 s, once, for the server

STEPS = ["collect", "export", "sft", "rl-prepare", "grpo", "evaluate", "infer", "demo"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prefect")
    with connected(folder / "home", folder / "server.log") as address:
        yield address


class House:
    """A profile that writes below one folder, and what its runs left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_atomic(folder / "train.jsonl", light_steps.task_line("train"))
        write_atomic(folder / "heldout.jsonl", light_steps.task_line("heldout"))
        flags = {"collect.tasks": "train.jsonl", "evaluate.tasks": "heldout.jsonl"} | {
            f"paths.{n}": n for n in ("data", "models", "output", "demo")
        }
        profile = load_profile("smoke", flags={key: str(folder / name) for key, name in flags.items()}, environ={})
        self.file = folder / "light.yaml"
        write_atomic(self.file, dump_profile(profile))
        self.layout = Layout(profile)

    def run(self, **parameters: Any) -> list[StepResult]:
        from flows.pipeline import pipeline

        with using(light_steps.TABLE):
            return pipeline(profile=str(self.file), **parameters)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of the newest run."""
        newest = max(self.layout.output.glob("*/profile.yaml"), key=lambda path: path.stat().st_mtime_ns).with_name(
            "events.jsonl"
        )
        lines = [json.loads(line) for line in newest.read_text().splitlines()] if newest.is_file() else []
        return [line for line in lines if line["kind"] == kind]

    def made(self) -> list[str]:
        return [event["step"] for event in self.events("made")]


@pytest.fixture
def house(tmp_path: Path, api: str) -> House:
    return House(tmp_path)


def test_the_pipeline_makes_every_step_in_order_and_hands_on_exact_paths_and_digests(house: House) -> None:
    results = house.run()
    assert [result.step for result in results] == house.made() == STEPS
    by_step = {result.step: result for result in results}
    called = {event["step"]: event for event in house.events("called")}
    assert called["export"]["inputs"]["trajectories"] == str(by_step["collect"].outputs["trajectories"])
    assert called["sft"]["inputs"]["rows"] == str(by_step["export"].outputs["rows"])
    assert called["grpo"]["inputs"]["rows"] == str(by_step["rl-prepare"].outputs["rows"])
    assert called["grpo"]["inputs"]["adapter"] == str(by_step["sft"].outputs["adapter"] / "adapter.bin")
    for step in ("evaluate", "infer"):
        for name in ("sft", "grpo"):
            assert called[step]["inputs"][f"adapter {name}"] == str(by_step[name].outputs["adapter"] / "adapter.bin")
    assert called["demo"]["inputs"]["inference"] == str(by_step["infer"].outputs["inference"])
    assert called["demo"]["inputs"]["report"] == str(by_step["evaluate"].outputs["report"])
    for event in called.values():
        assert all(event["digests"][name] == digest_file(Path(path)) for name, path in event["inputs"].items())


def test_a_second_run_makes_no_step_and_every_task_is_shown_as_cached(house: House) -> None:
    first = house.run()
    second = house.run()
    assert house.events("called") == []
    assert all(result.reused and result.why for result in second)
    assert [(r.outputs, r.digest) for r in second] == [(r.outputs, r.digest) for r in first]
    runs = _task_runs(house)
    assert sorted(name.split()[0] for name, _ in runs) == sorted(STEPS)
    assert {state for _, state in runs} == {"Cached"}


def test_a_result_that_only_its_manifest_still_knows_is_shown_as_cached_too(house: House) -> None:
    house.run()
    shutil.rmtree(house.layout.prefect / "storage")
    assert all(result.reused for result in house.run())
    assert house.made() == []
    assert {state for _, state in _task_runs(house)} == {"Cached"}


@pytest.mark.parametrize(
    ("pattern", "made"),
    [
        ("data/trajectories.parquet", ["collect"]),
        ("data/agent_lora_sft/sft/report.json", ["export"]),
        ("data/agent_lora_sft/sft/manifest.json", ["export"]),
        ("output/*-agent-lora-sft/v0-*/checkpoint-4", ["sft"]),
        ("output/*-agent-grpo", ["grpo"]),
        ("output/evaluate/*/v0-*/report.html", ["evaluate"]),
        ("output/infer", ["infer"]),
        ("demo", ["demo"]),
        ("output", ["sft", "grpo", "evaluate", "infer"]),
    ],
)
def test_what_was_deleted_between_two_runs_is_made_again_and_nothing_else(
    house: House, pattern: str, made: list[str]
) -> None:
    house.run()
    (path,) = house.folder.glob(pattern)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    house.run()
    assert house.made() == made
    assert all(result.reused for result in house.run())


def test_a_byte_changed_in_an_output_makes_its_step_run_again(house: House) -> None:
    house.run()
    (adapter,) = house.layout.sft.glob("v*/checkpoint-4/adapter.bin")
    adapter.write_text(adapter.read_text().replace("sft", "SFT"))
    house.run()
    assert house.made() == ["sft"]


def test_other_training_tasks_make_everything_after_them_run_again(house: House) -> None:
    house.run()
    write_atomic(house.folder / "train.jsonl", light_steps.task_line("other"))
    house.run()
    assert house.made() == STEPS


def test_a_forced_step_runs_and_the_others_are_reused(house: House) -> None:
    house.run()
    results = house.run(force=["rl-prepare"])
    assert house.made() == ["rl-prepare"]
    assert {result.step for result in results if not result.reused} == {"rl-prepare"}


def test_a_sandbox_failure_of_a_step_is_tried_again(house: House) -> None:
    write_atomic(house.layout.data / "trouble" / "collect", "sandbox")
    assert len(house.run()) == len(STEPS)
    assert [event["step"] for event in house.events("called")].count("collect") == 2


@pytest.mark.parametrize(
    ("kind", "error", "words"), [("work", WorkFailed, "exit code 3"), ("user", UserError, "holds no row")]
)
def test_what_would_fail_again_is_not_tried_again(house: House, kind: str, error: type[Exception], words: str) -> None:
    write_atomic(house.layout.data / "trouble" / "sft", kind)
    with pytest.raises(error, match=words):
        house.run()
    assert [event["step"] for event in house.events("called")] == ["collect", "export", "sft"]
    assert len(house.run()) == len(STEPS)
    assert house.made() == STEPS[2:]


def test_a_second_run_on_the_same_output_is_refused_by_name(house: House) -> None:
    with exclusive(house.layout.lock, "this test"), pytest.raises(UserError, match=r"output.*in use by process \d+"):
        house.run()
    assert len(house.run()) == len(STEPS)


def test_verdicts_counts_and_progress_are_artifacts(house: House) -> None:
    house.run()
    artifacts = {artifact.key: artifact for artifact in _artifacts(house)}
    overview = str(artifacts["pipeline"].data)
    assert "grpo 0.75" in overview
    assert "failed 1, duplicate 3" in overview
    assert all(f"| {step} | made |" in overview for step in STEPS)
    assert artifacts["sft"].data is not None
    assert "loss" in str(artifacts["sft"].data)
    assert float(str(artifacts["grpo-progress"].data)) == 100.0
    assert "| between the steps |" in overview
    assert "file:///" in str(artifacts["report"].data)
    assert "/report.html" in str(artifacts["report"].data)


def test_overrides_are_typed_and_a_wrong_one_is_refused(house: House) -> None:
    from prefect.exceptions import ParameterTypeError

    with pytest.raises(ParameterTypeError):
        house.run(overrides={"grpo_steps": 0})
    with pytest.raises(ParameterTypeError):
        house.run(overrides={"LLM_API_KEY": "x"})
    house.run(overrides={"seed": 7})
    stored = max(house.layout.output.glob("*/profile.yaml"), key=lambda path: path.stat().st_mtime_ns)
    assert "seed: 7\n" in stored.read_text()


def _newest(house: House) -> Any:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        return client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0].id


def _task_runs(house: House) -> list[tuple[str, str]]:
    """Name and state of every task run of the newest flow run. The server learns of them by events, a moment late."""
    import asyncio
    import time

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    async def read() -> list[tuple[str, str]]:
        async with get_client() as client:
            runs = await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[_newest(house)])))
        return [(run.name, run.state_name or "") for run in runs]

    end = time.monotonic() + 30
    while True:
        found = asyncio.run(read())
        if (
            len(found) == len(STEPS) and all(state in ("Cached", "Completed") for _, state in found)
        ) or time.monotonic() > end:
            return found
        time.sleep(0.3)


def _artifacts(house: House) -> list[Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    with get_client(sync_client=True) as client:
        return client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[_newest(house)]))
        )
