"""Behaviour 3 (sandboxes created == sandboxes killed) and behaviour 4 for the pool, by the mock's faults and by real sandboxes."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from sandboxes import ExecResult, SandboxError, SandboxGone, SandboxPool, SandboxTimeout, SandboxUnavailable
from sandboxes import pool as pool_module
from sandboxes.local import LocalBackend
from sandboxes.mock import NEVER, Fault, MockBackend


async def test_created_equals_killed_after_success_failure_timeout_and_cancellation() -> None:
    backend = MockBackend()
    pool = SandboxPool(backend, run_id="r", concurrency=3)

    async def episode(kind: str) -> None:
        async with pool.sandbox() as box:
            await box.run("true")
            if kind == "fails":
                raise ValueError(kind)
            if kind == "hangs":
                await asyncio.Event().wait()

    tasks = [asyncio.create_task(episode(kind)) for kind in ("works", "fails", "hangs", "works", "hangs", "waits")]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    assert pool.created == pool.killed > 0
    assert not backend.live


async def test_no_more_sandboxes_at_once_than_the_concurrency() -> None:
    backend = MockBackend()
    pool = SandboxPool(backend, run_id="r", concurrency=2)
    most = 0

    async def episode() -> None:
        nonlocal most
        async with pool.sandbox():
            most = max(most, len(backend.live))
            await asyncio.sleep(0.01)

    await asyncio.gather(*(episode() for _ in range(9)))
    assert (most, pool.created, pool.killed) == (2, 9, 9)


async def test_a_creation_that_never_returns_ends_at_its_deadline_and_frees_its_place() -> None:
    pool = SandboxPool(MockBackend([Fault("create", 1, NEVER)]), run_id="r", concurrency=1, create_timeout_s=0.1)
    with pytest.raises(SandboxTimeout, match="did not create"):
        async with pool.sandbox():
            raise AssertionError("unreachable")
    async with pool.sandbox() as box:
        assert (await box.run("echo again")).stdout == "again\n"
    await pool.close()
    assert pool.created == pool.killed == 1


async def test_a_kill_that_never_returns_ends_at_its_deadline_and_the_sweep_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "KILL_S", 0.1)
    backend = MockBackend([Fault("kill", 1, NEVER), Fault("kill", 2, SandboxError("no answer"))])
    pool = SandboxPool(backend, run_id="r", concurrency=1)
    for _ in range(2):
        async with pool.sandbox():
            pass
    assert (pool.created, pool.killed, len(backend.live)) == (2, 0, 2)
    await pool.close()
    assert (pool.created, pool.killed, len(backend.live)) == (2, 2, 0)


async def test_a_sandbox_that_dies_mid_episode_is_gone_for_good_and_the_next_one_works() -> None:
    pool = SandboxPool(MockBackend([Fault("run", 2, SandboxGone("the machine went away"))]), run_id="r", concurrency=1)
    async with pool.sandbox() as box:
        await box.run("true")
        for _ in range(2):
            with pytest.raises(SandboxGone):
                await box.run("true")
    async with pool.sandbox() as box:
        assert (await box.run("true")).exit_code == 0
    await pool.close()
    assert pool.created == pool.killed == 2


async def test_a_command_that_never_returns_ends_at_its_deadline_in_the_mock_too() -> None:
    box = await MockBackend([Fault("run", 1, NEVER)]).create(run_id="r", lifetime_s=60)
    result = await box.run("true", timeout_s=0.05)
    assert (result.exit_code, result.timed_out) == (124, True)


async def test_a_backend_that_cannot_run_says_so_through_the_pool() -> None:
    pool = SandboxPool(MockBackend([Fault("create", 1, SandboxUnavailable("install it"))]), run_id="r", concurrency=1)
    with pytest.raises(SandboxUnavailable, match="install it"):
        async with pool.sandbox():
            raise AssertionError("unreachable")
    await pool.close()
    assert pool.created == pool.killed == 0


async def test_a_closed_pool_makes_no_more() -> None:
    async with SandboxPool(MockBackend(), run_id="r", concurrency=1) as pool:
        pass
    with pytest.raises(SandboxError, match="closed"):
        async with pool.sandbox():
            raise AssertionError("unreachable")


def test_a_fault_schedule_with_a_wrong_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="operation is one of create, run"):
        MockBackend([Fault("explode", 1, NEVER)])


def test_a_pool_serves_successive_event_loops() -> None:
    pool = SandboxPool(MockBackend(), run_id="r", concurrency=1)

    async def three() -> list[ExecResult]:
        async def one() -> ExecResult:
            async with pool.sandbox() as box:
                return await box.run("true")

        return await asyncio.gather(*(one() for _ in range(3)))

    for _ in range(3):
        assert [result.exit_code for result in asyncio.run(three())] == [0, 0, 0]
    asyncio.run(pool.close())
    assert pool.created == pool.killed == 9


async def test_real_sandboxes_created_equal_killed_when_a_busy_pool_is_cancelled_and_closed(tmp_path: Path) -> None:
    backend = LocalBackend(root=tmp_path)
    pool = SandboxPool(backend, run_id="busy", concurrency=4)

    async def episode(index: int) -> None:
        async with pool.sandbox() as box:
            await box.run("sleep 100 & sleep 0.1" if index % 2 else "sleep 100", timeout_s=100)

    tasks = [asyncio.create_task(episode(index)) for index in range(8)]
    await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    started = time.monotonic()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    assert time.monotonic() - started < 10
    assert pool.created == pool.killed > 0
    assert not backend.boxes
    assert not os.listdir(tmp_path)
