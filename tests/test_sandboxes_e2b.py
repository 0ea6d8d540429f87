"""The E2B backend by the real SDK against a local E2B-compatible cloud (`e2b_cloud.py`); the real cloud is not reached here."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b_cloud import Cloud, cloud_at

from sandboxes import FileRefused, SandboxError, SandboxGone, SandboxPool, SandboxUnavailable
from sandboxes.e2b import RUN_KEY, E2BBackend


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with cloud_at(tmp_path) as (running, url):
        monkeypatch.setenv("E2B_API_URL", url)
        monkeypatch.setenv("E2B_SANDBOX_URL", url)
        monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
        yield running


async def test_an_episode_in_the_cloud_runs_commands_and_carries_files_and_kills_its_machine(cloud: Cloud) -> None:
    pool = SandboxPool(E2BBackend(template="mine"), run_id="run 1/ü", concurrency=2, lifetime_s=77.5)
    async with pool.sandbox() as box:
        made = next(iter(cloud.machines.values()))["body"]
        assert (made["templateID"], made["timeout"], made["metadata"]) == ("mine", 78, {RUN_KEY: "run 1/ü"})
        done = await box.run("echo $A; pwd; echo err >&2; exit 3", env={"A": "b"})
        assert (done.exit_code, done.stdout, done.stderr) == (3, "b\n/workspace\n", "err\n")
        slow = await box.run("echo ab; sleep 100", timeout_s=0.3)
        assert (slow.exit_code, slow.timed_out, slow.stdout) == (124, True, "ab\n")
        assert (await box.run("sleep 5 & echo x", timeout_s=4)).stdout == "x\n"
        await box.write_file("deep/f", bytes(range(256)))
        assert await box.read_file("/workspace/deep/f") == bytes(range(256))
        with pytest.raises(FileNotFoundError):
            await box.read_file("nope")
        with pytest.raises(FileRefused):
            await box.read_file("deep")
        async with pool.sandbox() as grader:
            await grader.import_workspace(await box.export_workspace())
            assert (await grader.run("wc -c < deep/f")).stdout == "256\n"
        await box.quiesce()
        assert not list((cloud.folder({"e2b-sandbox-id": box.id}) / "tmp").glob("agentexecutor-*"))
    await pool.close()
    assert pool.created == pool.killed == len(cloud.killed) == 2
    assert not cloud.machines


async def test_a_machine_that_vanished_is_gone_and_killing_it_is_silent(cloud: Cloud) -> None:
    box = await E2BBackend().create(run_id="r", lifetime_s=60)
    await box.kill()
    await box.kill()
    with pytest.raises(SandboxGone):
        await box.run("true")


async def test_sweep_kills_machines_of_this_run_only(cloud: Cloud) -> None:
    backend = E2BBackend()
    for run in ("a", "a", "b"):
        await backend.create(run_id=run, lifetime_s=60)
    assert await backend.sweep("a") == 2
    assert [machine["metadata"] for machine in cloud.machines.values()] == [{RUN_KEY: "b"}]


async def test_a_wrong_key_is_unavailable_and_a_full_cloud_is_infrastructure(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.broken = 400
    with pytest.raises(SandboxError, match="no room") as caught:
        await E2BBackend().create(run_id="r", lifetime_s=60)
    assert not isinstance(caught.value, SandboxUnavailable)
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "1" * 40)
    with pytest.raises(SandboxUnavailable, match="E2B_API_KEY"):
        await E2BBackend().create(run_id="r", lifetime_s=60)


def test_one_machine_serves_successive_event_loops(cloud: Cloud) -> None:
    box = asyncio.run(E2BBackend().create(run_id="loops", lifetime_s=60))
    for number in range(2):
        assert asyncio.run(box.run(f"echo {number}")).stdout == f"{number}\n"
    asyncio.run(box.kill())
