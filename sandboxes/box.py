"""The host's side of one local sandbox: spawn it, talk to its supervisor, end it. Runs in the background loop only."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from sandboxes import bwrap, frames
from sandboxes.base import WORKSPACE, FileRefused, SandboxError, SandboxGone, SandboxTimeout

ANSWER_S: Final = 15.0
"""How much longer than a call's own deadline the supervisor may take to answer: a machine whose cores all train is slow."""

END_S: Final = 2.0
"""How long a box may take to end by itself before it is killed."""

SOURCES: Final = ("frames", "boxfs", "census", "command", "supervisor")
"""The modules of this package that run inside the box."""

OVERHEAD: Final = 256 << 20
"""How many bytes one answer may take beyond the workspace's size twice: tar headers, or the output of a flooding command."""


def _memory_file(name: str, content: bytes) -> int:
    handle = os.memfd_create(name)
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _box_files() -> dict[str, bytes]:
    package = f"{bwrap.SUPERVISOR}/sandboxes"
    folder = Path(__file__).parent
    files = {f"{package}/__init__.py": b""}
    files |= {f"{package}/{name}.py": (folder / f"{name}.py").read_bytes() for name in SOURCES}
    return files | {f"/etc/{name}": text.encode() for name, text in bwrap.ETC.items()}


class Box:
    """One bubblewrap with its supervisor. `gone` holds the reason once it has ended."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: socket.socket, stderr: IO[bytes], *, answer_bytes: int
    ) -> None:
        self.process, self.link, self.stderr = process, link, stderr
        self.gone: str | None = None
        self._inbox = frames.Inbox(answer_bytes)
        self.exited = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {
            0: asyncio.get_running_loop().create_future()
        }
        self._ready = self._waiting[0]
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())
        pidfd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._reap, pidfd)

    @classmethod
    async def start(cls, *, network: bool, sizes: dict[str, int], options: dict[str, Any]) -> Box:
        """Spawn a box and wait until its supervisor answers. Raises `SandboxUnavailable` or `SandboxError` with bubblewrap's own words."""
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `end`)
        handles = {path: _memory_file(path, content) for path, content in _box_files().items()}
        try:
            line = bwrap.argv(
                handles, network=network, sizes=sizes, arguments=[str(theirs.fileno()), json.dumps(options)]
            )
            process = subprocess.Popen(  # noqa: ASYNC220  (1 ms, and it must be this thread: see background.py)
                line, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
                pass_fds=[theirs.fileno(), *handles.values()], cwd="/",
            )  # fmt: skip
        except BaseException:
            ours.close()
            stderr.close()
            raise
        finally:
            theirs.close()
            for handle in handles.values():
                os.close(handle)
        ours.setblocking(False)
        box = cls(process, ours, stderr, answer_bytes=2 * sizes[WORKSPACE] + OVERHEAD)
        try:
            await box._ready
        except SandboxGone:
            await box.end()
            raise bwrap.startup_error(box.stderr_text) from None
        except BaseException:
            await asyncio.shield(box.end())
            raise
        return box

    def _reap(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self.process.wait()
        if not self.exited.done():
            self.exited.set_result(None)

    async def _read(self) -> None:
        loop, reason = asyncio.get_running_loop(), "it died"
        try:
            while data := await loop.sock_recv(self.link, 1 << 20):
                for raw, payload in self._inbox.feed(data):
                    header = frames.check(raw)
                    if "gone" in header:
                        reason = header["gone"]
                    elif (future := self._waiting.pop(header["id"], None)) and not future.done():
                        future.set_result((header, payload))
        except OSError as error:
            reason = f"its connection broke ({error.strerror})"
        except (ValueError, RecursionError) as error:  # nothing that follows can be trusted either
            reason = f"it sent what is no answer ({error})"
            self.kill_now()
        finally:
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        self.gone = self.gone or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxGone(f"The local sandbox is gone: {self.gone}."))
                future.exception()  # seen: nobody may be waiting any more
        self._waiting.clear()

    async def ask(
        self, operation: str, header: dict[str, Any], payload: bytes = b"", *, deadline_s: float = 0.0
    ) -> tuple[dict[str, Any], bytes]:
        """One request. Raises `FileRefused`, `FileNotFoundError`, `SandboxGone`, or `SandboxTimeout` after which the box is dead."""
        if self.gone:
            raise SandboxGone(f"The local sandbox is gone: {self.gone}.")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s + ANSWER_S):
                async with self._writing:
                    await self._send(frames.pack({"id": number, "op": operation, **header}, payload))
                answer, body = await future
        except TimeoutError:
            self._lost(f"it did not answer `{operation}` within {deadline_s + ANSWER_S:g} s")
            await asyncio.shield(self.end())
            raise SandboxTimeout(
                f"The local sandbox did not answer `{operation}` within {deadline_s + ANSWER_S:g} s."
            ) from None
        except OSError as error:
            raise SandboxGone(f"The local sandbox is gone: {self.gone or error}.") from None
        finally:
            self._waiting.pop(number, None)
        if "failed" in answer:
            raise SandboxError(f"The local sandbox could not do `{operation}`: {answer['failed']}.")
        if "refused" in answer:
            raise FileNotFoundError(answer["refused"]) if answer["missing"] else FileRefused(answer["refused"])
        if missing := frames.NEEDED.get(operation, frozenset()) - answer.keys():
            self._lost(f"it sent what is no answer (no `{min(missing)}`)")
            await asyncio.shield(self.end())
            raise SandboxGone(f"The local sandbox is gone: {self.gone}.")
        return answer, body

    async def _send(self, frame: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self.link, frame)
        except asyncio.CancelledError:
            self._lost(
                "a call was cancelled while it was being sent"
            )  # half a frame may be out: no other can follow it
            raise

    async def end(self) -> None:
        """End the box with everything in it, and wait until the kernel has. Idempotent; raises nothing."""
        self.gone = self.gone or "it was killed"
        with suppress(OSError):
            self.link.shutdown(
                socket.SHUT_RDWR
            )  # the supervisor exits, and the kernel ends its whole process namespace before bubblewrap exits
        await asyncio.wait([self.exited], timeout=END_S)
        if not self.exited.done():
            self.kill_now()
            await asyncio.wait([self.exited], timeout=ANSWER_S)
        await asyncio.wait([self._reader], timeout=END_S)
        if not self.stderr.closed:
            self.stderr.seek(0)
            self.stderr_text = self.stderr.read(100_000).decode("utf-8", "replace")
            self.stderr.close()
        self.link.close()

    stderr_text = ""
    """What bubblewrap or the supervisor said, once the box has ended."""

    def kill_now(self) -> None:
        """SIGKILL to bubblewrap; the box follows by its parent-death signal. For when there is no time (interpreter exit)."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()


def settings(
    *, memory_mb: int, processes: int, disk_mb: int, lifetime_s: float
) -> tuple[dict[str, int], dict[str, Any]]:
    """Tree sizes for bubblewrap and options for the supervisor."""
    disk = disk_mb << 20
    sizes = {WORKSPACE: disk, "/tmp": disk, "/dev/shm": 64 << 20}
    # DATA counts what is reserved, as thread stacks are: four times what may be used stops only what is absurd, at once. Use is watched.
    limits = {"NPROC": processes, "DATA": memory_mb << 22, "FSIZE": disk, "CORE": 0, "NOFILE": 1024}
    options = {
        "workspace": WORKSPACE, "writable": list(sizes), "lifetime_s": lifetime_s, "processes": processes, "memory_bytes": memory_mb << 20,
        "limits": limits, "env": bwrap.ENVIRONMENT,
    }  # fmt: skip
    return sizes, options
