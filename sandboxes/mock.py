"""The `mock` backend: sandboxes in memory, with faults on schedule. For tests, dry demonstrations, and users' own tests.

It runs no program. `run` understands, honestly, a handful of commands over its in-memory files (see `shell.py`) and answers every other one with
exit 127 and "mock: cannot run", so that nothing seems to work that did not happen.
"""

from __future__ import annotations

import asyncio
import itertools
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from posixpath import dirname
from typing import Final

from sandboxes import boxfs
from sandboxes.base import (
    MAX_ARCHIVE_BYTES,
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    WORKSPACE,
    ExecResult,
    FileRefused,
    SandboxError,
    SandboxGone,
)
from sandboxes.shell import Shell, absolute

NEVER: Final = "never"
"""As a fault's `error`: the operation does not return (its caller's deadline must end it)."""

OPERATIONS: Final = (
    "create",
    "run",
    "read_file",
    "write_file",
    "quiesce",
    "export_workspace",
    "import_workspace",
    "kill",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        operation: one of `OPERATIONS`.
        nth: at which call of it, over all sandboxes of the backend, from 1.
        error: what is raised, or `NEVER`. After `SandboxGone` that sandbox stays dead.
    """

    operation: str
    nth: int
    error: SandboxError | str


class MockSandbox:
    """An in-memory workspace: `files` maps absolute paths to bytes (regular file), str (symlink target) or None (directory)."""

    def __init__(self, backend: MockBackend, ident: str, lifetime_s: float) -> None:
        self._backend, self._id, self._ends = backend, ident, time.monotonic() + lifetime_s
        self.files: dict[str, bytes | str | None] = {"/": None, "/tmp": None, WORKSPACE: None}
        self.gone = False

    @property
    def id(self) -> str:
        return self._id

    async def _enter(self, operation: str) -> None:
        if time.monotonic() >= self._ends:
            self._bury()
        if self.gone:
            raise SandboxGone("The mock sandbox is gone.")
        try:
            await self._backend.strike(operation)
        except SandboxGone:
            self._bury()
            raise

    def _bury(self) -> None:
        self.gone = True
        self._backend.live.pop(self._id, None)

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
        max_output: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Interpret `command`; an operation that never returns ends at `timeout_s` with exit 124, as a real command would."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._enter("run")
        except TimeoutError:
            return ExecResult(124, "", "", time.monotonic() - started, timed_out=True)
        code, out, err = Shell(self.files, absolute(WORKSPACE, cwd)).run(command)
        kept_out, kept_err = out[:max_output], err[:max_output]
        dropped = len(out) + len(err) - len(kept_out) - len(kept_err)
        return ExecResult(
            code,
            kept_out.decode("utf-8", "replace"),
            kept_err.decode("utf-8", "replace"),
            time.monotonic() - started,
            False,
            dropped,
        )

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        await self._enter("read_file")
        full = self._full(path)
        if full not in self.files:
            raise FileNotFoundError(f"{path!r}: no such file")
        data = self.files[full]
        if not isinstance(data, bytes):
            raise FileRefused(f"{path!r}: it is {'a directory' if data is None else 'a symlink'}, not a regular file")
        if len(data) > max_bytes:
            raise FileRefused(f"{path!r}: {len(data)} bytes, more than the {max_bytes} that one call reads")
        return data

    async def write_file(self, path: str, data: bytes) -> None:
        await self._enter("write_file")
        full = self._full(path)
        if len(data) > MAX_FILE_BYTES:
            raise FileRefused(f"{path!r}: {len(data)} bytes, more than the {MAX_FILE_BYTES} that one call writes")
        if path.endswith("/") or not isinstance(self.files.get(full, b""), bytes):
            raise FileRefused(f"{path!r}: it is not a regular file")
        self._parents(path, full)
        self.files[full] = bytes(data)

    def _full(self, path: str) -> str:
        if "\0" in path:
            raise FileRefused(f"{path!r}: not a valid path (embedded null byte)")
        try:
            path.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise FileRefused(f"{path!r}: not a valid path ({error.reason})") from None
        return absolute(WORKSPACE, path)

    def _parents(self, path: str, full: str) -> None:
        parent = dirname(full)
        while parent not in self.files:
            parent = dirname(parent)
        if self.files[parent] is not None:
            raise FileRefused(f"{path!r}: {parent} is not a directory")
        while (full := dirname(full)) != parent:
            self.files[full] = None

    async def quiesce(self) -> None:
        await self._enter("quiesce")

    async def export_workspace(self, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> bytes:
        await self._enter("export_workspace")
        below = {
            path[len(WORKSPACE) + 1 :]: data
            for path, data in sorted(self.files.items())
            if path.startswith(WORKSPACE + "/")
        }
        if sum(len(data) for data in below.values() if isinstance(data, bytes)) > max_bytes:
            raise FileRefused(f"the workspace holds more than {max_bytes} bytes in files; remove what is not needed")
        buffer = BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
            for name, data in below.items():
                info = tarfile.TarInfo(name)
                if isinstance(data, bytes):
                    info.size = len(data)
                    archive.addfile(info, BytesIO(data))
                else:
                    info.type, info.linkname, info.mode = (
                        (tarfile.DIRTYPE, "", 0o755) if data is None else (tarfile.SYMTYPE, data, 0o777)
                    )
                    archive.addfile(info)
        return buffer.getvalue()

    async def import_workspace(self, archive: bytes) -> None:
        await self._enter("import_workspace")
        try:
            entries = boxfs.members(archive, MAX_ARCHIVE_BYTES)
        except boxfs.Refused as error:
            raise FileRefused(str(error)) from None
        for path in [path for path in self.files if path.startswith(WORKSPACE + "/")]:
            del self.files[path]
        for info, content in entries:
            full = f"{WORKSPACE}/{info.name}"
            self._parents(info.name, full)
            self.files[full] = None if info.isdir() else info.linkname if info.issym() else content

    async def kill(self) -> None:
        if not self.gone:
            await self._backend.strike("kill")
            self._bury()


class MockBackend:
    """Makes in-memory sandboxes.

    Args:
        script: the faults to come; each happens once.
    """

    name: Final = "mock"

    def __init__(self, script: Sequence[Fault] = ()) -> None:
        for fault in script:
            if (
                fault.operation not in OPERATIONS
                or fault.nth < 1
                or (isinstance(fault.error, str) and fault.error != NEVER)
            ):
                raise ValueError(
                    f"{fault}: operation is one of {', '.join(OPERATIONS)}; nth starts at 1; error is a SandboxError or {NEVER!r}"
                )
        self._script = {(fault.operation, fault.nth): fault.error for fault in script}
        self._counts = dict.fromkeys(OPERATIONS, 0)
        self._numbers = itertools.count(1)
        self.live: dict[str, tuple[str, MockSandbox]] = {}

    async def strike(self, operation: str) -> None:
        """Count one call of `operation` and do what the schedule says."""
        self._counts[operation] += 1
        error = self._script.get((operation, self._counts[operation]))
        if isinstance(error, SandboxError):
            raise error
        if error == NEVER:
            await asyncio.Event().wait()

    async def create(self, *, run_id: str, lifetime_s: float) -> MockSandbox:
        await self.strike("create")
        box = MockSandbox(self, f"mock-{next(self._numbers)}", lifetime_s)
        self.live[box.id] = (run_id, box)
        return box

    async def sweep(self, run_id: str) -> int:
        found = [box for run, box in list(self.live.values()) if run == run_id]
        for box in found:
            box._bury()
        return len(found)
