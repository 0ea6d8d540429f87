"""The smoke profile as deployments: a real server, a cpu and a gpu worker, `prefect deployment run 'pipeline/manual'`, to Completed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from configs.files import write_atomic
from configs.load import ROOT, dump_profile, load_profile
from tasks_lib.deploy import deploy
from tasks_lib.server import connected, worker
from training.keeper import descendants
from training.supervise import Child

STEPS = ["collect", "export", "sft", "rl-prepare", "grpo", "evaluate", "infer", "demo"]
GPU = ["sft", "grpo", "evaluate", "infer"]
KEYS = {"LLM_API_KEY": "sk-marked-8f1c2e77", "E2B_API_KEY": "e2b_marked_55d0aa91"}


class Place:
    """A server, its two workers, and a profile that writes below `folder` only."""

    def __init__(self, folder: Path, api: str, gpu: Child) -> None:
        self.folder, self.api, self.gpu = folder, api, gpu

    def start(self) -> UUID:
        """As a user starts it; the id of the flow run."""
        command = [sys.executable, "-m", "prefect", "deployment", "run", "pipeline/manual"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=self.folder, env={**os.environ, "COLUMNS": "200"}
        )
        found = re.search(r"UUID: ([0-9a-f-]{36})", done.stdout)
        assert found, done.stdout
        return UUID(found.group(1))

    def state(self, run: UUID) -> Any:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            return client.read_flow_run(run).state

    def wait(self, run: UUID, seconds: float) -> Any:
        """The final state."""
        end = time.monotonic() + seconds
        while not (state := self.state(run)).is_final():
            assert time.monotonic() < end, f"still {state.name} after {seconds} s"
            time.sleep(0.5)
        return state

    def children(self, of: UUID) -> dict[str, str]:
        """Flow name → state of the newest run of every GPU step submitted by `of`."""
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
        from prefect.client.schemas.sorting import FlowRunSort

        with get_client(sync_client=True) as client:
            wanted = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[of]))
            runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return {run.name.split()[0]: run.state.name if run.state else "" for run in runs}

    def trainers(self) -> list[int]:
        """Processes below the gpu worker that belong to torch's launcher, trainer or server."""
        found = []
        for pid in descendants(self.gpu.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"torch.distributed.run" in command or b"swift.cli" in command:
                found.append(pid)
        return found


@contextmanager
def _deployed(folder: Path) -> Iterator[Place]:
    paths = {f"paths.{name}": str(folder / name) for name in ("data", "output", "demo")}
    write_atomic(folder / "smoke.yaml", dump_profile(load_profile("smoke", flags=paths, environ={})))
    home = folder / "output" / ".prefect"
    with connected(home, folder / "logs" / "server.log") as api:
        changes = deploy(str(folder / "smoke.yaml"))
        assert len([line for line in changes if line.endswith("made") or "made," in line]) == 9, changes
        assert deploy(str(folder / "smoke.yaml")) == []
        with (
            worker("cpu", api, home, folder / "logs" / "cpu.log"),
            worker("gpu", api, home, folder / "logs" / "gpu.log") as gpu,
        ):
            yield Place(folder, api, gpu)


@pytest.mark.slow  # the smoke pipeline, and half a minute for each of server, deployments and GPU step
@pytest.mark.timeout(1500)
def test_the_smoke_pipeline_runs_as_deployments_is_cancelled_whole_and_completes_when_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with _deployed(tmp_path) as place:
        first = place.start()
        end = time.monotonic() + 300
        while not place.trainers():
            assert time.monotonic() < end, (place.state(first), place.children(first))
            assert not place.state(first).is_final(), place.state(first)
            time.sleep(0.3)

        waiting = place.start()  # a second one at once: it waits for its pool
        time.sleep(5)
        assert place.state(waiting).name not in ("Running", "Completed")
        _cancel(waiting)
        place.wait(waiting, 60)

        trainers = place.trainers()
        assert trainers
        _no_key_in_a_process_list()
        asked = time.monotonic()
        _cancel(first)
        assert place.wait(first, 60).name == "Cancelled"
        while place.trainers() and time.monotonic() - asked < 60:
            time.sleep(0.3)
        assert place.trainers() == []
        while place.children(first)["sft"] != "Cancelled" and time.monotonic() - asked < 60:
            time.sleep(0.3)
        assert place.children(first) == {"sft": "Cancelled"}

        second = place.start()
        state = place.wait(second, 900)
        assert state.name == "Completed", (state.message, place.children(second))
        results = state.result()
        assert [result.step for result in results] == STEPS
        assert {r.step for r in results if r.reused} == {"collect", "export"}
        assert place.children(second) == dict.fromkeys(GPU, "Completed")
        assert all(path.exists() for result in results for path in result.outputs.values())
        assert "| grpo | made |" in _artifact("pipeline")
        assert float(_artifact("sft-progress")) > 0

    _no_key_anywhere(tmp_path)


def _cancel(run: UUID) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelling())


def _artifact(key: str) -> str:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.client.schemas.sorting import ArtifactSort

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])), sort=ArtifactSort.CREATED_DESC, limit=1
        )
    assert found, f"no artifact {key}"
    return str(found[0].data)


def _no_key_in_a_process_list() -> None:
    """No command line below us, server and trainers included, shows a key, and the server does not even have one in its environment."""
    servers = 0
    for pid in descendants(os.getpid()):
        try:
            command, environ = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        assert not any(value.encode() in command for value in KEYS.values()), command
        if b"prefect.server.api.server:create_app" in command and b"keeper.py" not in command:
            servers += 1
            assert not any(value.encode() in environ for value in KEYS.values())
    assert servers == 1


def _no_key_anywhere(folder: Path) -> None:
    """Every byte of every file that the run left: database and its log, results, logs, trajectories, profile, checkpoints."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "prefect.db" for path in files)
    assert any(path.suffix == ".parquet" for path in files)
    found = [(name, str(path)) for path in files for name, value in KEYS.items() if value.encode() in path.read_bytes()]
    assert found == []


def test_the_file_of_deployments_names_no_path_of_a_machine_and_no_secret() -> None:
    text = (ROOT / "prefect.yaml").read_text(encoding="utf-8")
    assert not re.search(r"(^|[\s\"'])/\w", text)
    assert set(re.findall(r"\$(\w+)", text)) == {"AGENTEXECUTOR_ROOT", "AGENTEXECUTOR_PROFILE"}


def test_deploying_without_a_server_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from configs.errors import UserError
from tasks_lib.deploy import deploy
try:
    deploy("smoke")
except UserError as error:
    print(error)
"""
    base = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(tmp_path)
    }
    for given, words in (
        ({}, "prefect server start"),
        ({"PREFECT_API_URL": "http://127.0.0.1:9/api"}, "does not answer"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={**base, **given}, check=True
        )
        assert words in done.stdout, done.stdout + done.stderr
