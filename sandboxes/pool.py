"""Sandboxes for one run: at most so many at once, and every one that was created is killed, whatever happens in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final

from sandboxes.base import Backend, Sandbox, SandboxError, SandboxTimeout

KILL_S: Final = 20.0
"""Deadline of one kill, in seconds. What is missed then ends by its lifetime, and by the sweep at `close`."""

log = logging.getLogger(__name__)


class SandboxPool:
    """`async with pool.sandbox() as box:` over one backend.

    Args:
        backend: who makes them.
        run_id: marks them, so that `close` and later processes find what was left.
        concurrency: sandboxes at once; further callers wait.
        create_timeout_s: deadline of one creation, in seconds.
        lifetime_s: every sandbox ends by itself after this, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        run_id: str,
        concurrency: int,
        create_timeout_s: float = 60.0,
        lifetime_s: float = 900.0,
    ) -> None:
        self.backend, self.run_id = backend, run_id
        self.create_timeout_s, self.lifetime_s = create_timeout_s, lifetime_s
        self.created, self.killed = 0, 0
        self._concurrency = concurrency
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._live: dict[str, Sandbox] = {}
        self._pending: set[asyncio.Task[Sandbox]] = set()
        self._closed = False

    async def __aenter__(self) -> SandboxPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _semaphore(self) -> asyncio.Semaphore:
        """The slots of the running loop: a pool may serve one event loop after another (GRPO's plugins do), never two at a time."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        return self._slots[1]

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A fresh sandbox, killed at the end of the block. Raises `SandboxError`: `SandboxTimeout` when creation takes too long."""
        async with self._semaphore():
            box = await self._create()
            try:
                yield box
            finally:
                await self._uninterrupted(self._kill(box))

    async def _create(self) -> Sandbox:
        if self._closed:
            raise SandboxError("This pool of sandboxes is closed.")
        task = asyncio.ensure_future(self.backend.create(run_id=self.run_id, lifetime_s=self.lifetime_s))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=self.create_timeout_s)
        except asyncio.CancelledError:
            await self._uninterrupted(self._abandon(task))
            raise
        if not done:
            await self._uninterrupted(self._abandon(task))
            raise SandboxTimeout(
                f"The {self.backend.name} backend did not create a sandbox within {self.create_timeout_s:g} s."
            )
        box = task.result()
        self.created += 1
        self._live[box.id] = box
        return box

    async def _abandon(self, task: asyncio.Task[Sandbox]) -> None:
        """Give up a creation; a sandbox that arrives in spite of the cancellation is killed like any other."""
        task.cancel()
        await asyncio.wait({task}, timeout=KILL_S)
        if task.done() and not task.cancelled() and task.exception() is None:
            box = task.result()
            self.created += 1
            self._live[box.id] = box
            await self._kill(box)

    async def _kill(self, box: Sandbox) -> None:
        if self._live.pop(box.id, None) is None:
            return
        try:
            async with asyncio.timeout(KILL_S):
                await box.kill()
            self.killed += 1
        except (TimeoutError, SandboxError) as error:
            log.warning(
                "sandbox %s could not be killed (%s); the sweep or its lifetime ends it", box.id, error or "no answer"
            )

    async def _uninterrupted(self, work: object) -> None:
        """Await `work` to its end even when we are cancelled meanwhile, then let the cancellation go on."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        cancelled = False
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                cancelled = True
        task.result()
        if cancelled:
            raise asyncio.CancelledError

    async def close(self) -> None:
        """Kill what is left and sweep the run's sandboxes. Safe to call twice; raises nothing about a sandbox."""
        self._closed = True
        await self._uninterrupted(self._close())

    async def _close(self) -> None:
        await asyncio.gather(
            *(self._abandon(task) for task in list(self._pending)),
            *(self._kill(box) for box in list(self._live.values())),
        )
        try:
            async with asyncio.timeout(KILL_S):
                self.killed += await self.backend.sweep(self.run_id)
        except (TimeoutError, SandboxError) as error:
            log.warning(
                "sandboxes of run %s could not be swept (%s); their lifetime ends them",
                self.run_id,
                error or "no answer",
            )
