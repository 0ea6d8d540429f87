"""The `local` backend: one bubblewrap per sandbox, on this machine, without root, network, or sight of the host.

Contained: files (only /usr and a synthetic /etc, read-only; workspace and /tmp in memory with a kernel-enforced size), processes (own namespace,
count limit), memory (watched over the whole box), network (own empty namespace), time (lifetime, parent death), output (kept up to a limit).
Memory counts what processes map, memory files that they hold open, and System V objects. Not counted: what only the kernel holds (socket and pipe
buffers, memory files in flight through a socket, shared pages that were written and are no longer mapped or open); there the kernel's out-of-memory
killer takes the box first.
"""

from __future__ import annotations

import asyncio
import atexit
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sandboxes.background import background_loop, in_background
from sandboxes.base import (
    MAX_ARCHIVE_BYTES,
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    WORKSPACE,
    ExecResult,
    FileRefused,
    SandboxError,
)
from sandboxes.base import Sandbox as Sandbox
from sandboxes.box import Box, settings
from sandboxes.records import Records

FILE_S: Final = 15.0
"""Deadline of a file call, in seconds; the whole workspace is in memory."""

START_S: Final = 60.0
"""Deadline of a start: 0.1 s on an idle machine, many seconds on one that loads a model on every core."""


def _text(text: str) -> str:
    """`text` with what no byte string can hold (lone surrogates out of a model's JSON) replaced."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


class LocalSandbox:
    """One sandbox; usable from any event loop of the process that made it."""

    def __init__(self, backend: LocalBackend, box: Box, run_id: str, ident: str) -> None:
        self._backend, self._box, self._id = backend, box, ident
        self._ending: asyncio.Task[None] | None = None
        self._record = backend.records.write(run_id, self._id, box.process.pid)

    @property
    def id(self) -> str:
        return self._id

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
        max_output: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """See `sandboxes.base.Sandbox.run`. What exceeds a limit of the box is killed and `stderr` says so in a line `[sandbox] …`."""
        header = {
            "command": _text(command),
            "timeout_s": timeout_s,
            "env": dict(env or {}),
            "cwd": _text(cwd),
            "max_output": max_output,
        }
        answer, output = await self._ask("run", header, deadline_s=timeout_s)
        stdout, stderr = output[: answer["split"]], output[answer["split"] :]
        return ExecResult(
            exit_code=answer["exit_code"],
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            seconds=answer["seconds"],
            timed_out=answer["timed_out"],
            dropped_bytes=answer["dropped"],
        )

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        return (await self._ask("read", {"path": path, "max_bytes": max_bytes}))[1]

    async def write_file(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise FileRefused(f"{path!r}: {len(data)} bytes, more than the {MAX_FILE_BYTES} that one call writes")
        await self._ask("write", {"path": path}, data)

    async def quiesce(self) -> None:
        answer, _ = await self._ask("quiesce", {})
        if "left" in answer:
            raise SandboxError(f"{answer['left']} killed threads in the sandbox did not end.")

    async def export_workspace(self, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> bytes:
        return (await self._ask("export", {"max_bytes": max_bytes}))[1]

    async def import_workspace(self, archive: bytes) -> None:
        await self._ask("import", {"max_bytes": MAX_ARCHIVE_BYTES}, archive)

    async def kill(self) -> None:
        await in_background(self.end())

    async def end(self) -> None:
        """`kill`, in the background loop: once begun it goes on when its caller is cancelled."""
        self._ending = self._ending or asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _ask(
        self, operation: str, header: dict[str, Any], payload: bytes = b"", deadline_s: float = FILE_S
    ) -> tuple[dict[str, Any], bytes]:
        return await in_background(self._box.ask(operation, header, payload, deadline_s=deadline_s))

    async def _end(self) -> None:
        await self._box.end()
        self._backend.records.erase(self._record)
        self._backend.boxes.pop(self._id, None)

    def end_now(self) -> None:
        """At interpreter exit, without a loop."""
        self._box.kill_now()
        self._backend.records.erase(self._record)


class LocalBackend:
    """Makes bubblewrap sandboxes on this Linux machine.

    Args:
        root: where the records for `sweep` are; a per-user folder below the system's temporary folder by default.
        network: whether commands reach the network.
        memory_mb: memory of all processes of one sandbox together, in MiB.
        processes: processes and threads of one sandbox.
        disk_mb: size of the workspace, and of /tmp, in MiB; both take memory for what they hold.
    """

    name: Final = "local"

    def __init__(
        self,
        *,
        root: Path | None = None,
        network: bool = False,
        memory_mb: int = 1024,
        processes: int = 128,
        disk_mb: int = 256,
    ) -> None:
        self.network, self.memory_mb, self.processes, self.disk_mb = network, memory_mb, processes, disk_mb
        self.records = Records(root)
        self.boxes: dict[str, LocalSandbox] = {}
        self._creating: dict[str, asyncio.Task[Any]] = {}
        self._pruned = False
        _backends.add(self)

    async def create(self, *, run_id: str, lifetime_s: float) -> LocalSandbox:
        """A fresh sandbox. Raises `SandboxUnavailable` with the fix where bubblewrap cannot run."""
        ident = secrets.token_hex(8)
        try:
            return await in_background(self._create(ident, run_id, lifetime_s))
        except asyncio.CancelledError:
            asyncio.run_coroutine_threadsafe(self._forget(ident), background_loop())
            raise

    async def _forget(self, ident: str) -> None:
        """End a sandbox whose creation was cancelled in the instant in which it succeeded: nobody else knows of it."""
        if task := self._creating.get(ident):
            await asyncio.wait([task])
        if sandbox := self.boxes.get(ident):
            await sandbox.end()

    async def _create(self, ident: str, run_id: str, lifetime_s: float) -> LocalSandbox:
        task = asyncio.current_task()
        assert task is not None
        self._creating[ident] = task
        task.add_done_callback(lambda _: self._creating.pop(ident, None))
        if not self._pruned:
            self._pruned = True
            self.records.prune()
        sizes, options = settings(
            memory_mb=self.memory_mb, processes=self.processes, disk_mb=self.disk_mb, lifetime_s=lifetime_s
        )
        try:
            async with asyncio.timeout(START_S):
                box = await Box.start(network=self.network, sizes=sizes, options=options)
        except TimeoutError:
            raise SandboxError(f"A local sandbox did not start within {START_S:g} s.") from None
        try:
            sandbox = LocalSandbox(self, box, run_id, ident)
        except OSError as error:
            await box.end()
            raise SandboxError(
                f"{self.records.root}: the sandbox's record cannot be written ({error.strerror})."
            ) from None
        self.boxes[ident] = sandbox
        return sandbox

    async def sweep(self, run_id: str) -> int:
        """Kill every sandbox of `run_id`, whichever process made it; returns how many were still alive."""
        return await in_background(asyncio.to_thread(self.records.sweep, run_id))


_backends: weakref.WeakSet[LocalBackend] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for backend in list(_backends):
        for sandbox in list(backend.boxes.values()):
            with suppress(OSError):
                sandbox.end_now()
