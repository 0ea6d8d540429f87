"""The sandbox protocol, its results and the vocabulary of its errors.

A *sandbox* is one disposable machine for one agent or one grading. A *backend* makes sandboxes. Everything an agent does goes through
the protocol below, so the same episode runs on a laptop, in the cloud and in memory.

Errors assign blame. `SandboxError` means the infrastructure failed: the episode is tried again and never scored. `FileRefused` means that the
*request* was wrong (a FIFO, a directory, a path outside, too many bytes): the agent is shown the sentence and goes on. A command that exits
non-zero or runs into its deadline is no error at all: it is an `ExecResult`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

WORKSPACE: Final = "/workspace"
"""The working directory of every backend, defined only here."""

MAX_OUTPUT_BYTES: Final = 64 * 1024
"""Bytes of stdout and of stderr kept per command; the rest is counted in `ExecResult.dropped_bytes`."""

MAX_FILE_BYTES: Final = 8 * 1024 * 1024
"""Largest file that the file calls read or write, in bytes."""

MAX_ARCHIVE_BYTES: Final = 64 * 1024 * 1024
"""Largest workspace archive, in bytes of file content."""


class SandboxError(RuntimeError):
    """The infrastructure failed; nothing can be concluded about the agent."""


class SandboxUnavailable(SandboxError):
    """This backend cannot run here at all (missing bubblewrap, missing key): retrying is useless. The message says how to fix it."""


class SandboxGone(SandboxError):
    """The sandbox died, was killed or reached its lifetime."""


class SandboxTimeout(SandboxError):
    """The backend did not answer within the deadline of a call."""


class FileRefused(ValueError):
    """A file call asked for something that is not a regular, bounded file inside the sandbox."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did.

    `exit_code` is the shell's (128 + n after signal n); it is 124 when `timed_out`. Output is decoded as UTF-8 with replacement.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    dropped_bytes: int = 0


@runtime_checkable
class Sandbox(Protocol):
    """One disposable machine. Every call ends by its own deadline and raises `SandboxError` when the infrastructure is at fault."""

    @property
    def id(self) -> str: ...

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
        max_output: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run `command` by bash. Returns at the deadline even when a background child holds stdout; partial output is kept."""
        ...

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Read a regular file (absolute, or relative to the workspace). Raises `FileRefused`, or `FileNotFoundError`."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a regular file, making its parent directories. Raises `FileRefused`."""
        ...

    async def quiesce(self) -> None:
        """Kill every process that commands have left behind; the files stay."""
        ...

    async def export_workspace(self, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> bytes:
        """The workspace as an uncompressed tar of directories, regular files and symlinks. Raises `FileRefused` when it is larger."""
        ...

    async def import_workspace(self, archive: bytes) -> None:
        """Replace the workspace's contents by such a tar; entries that would leave the workspace are refused (`FileRefused`)."""
        ...

    async def kill(self) -> None:
        """End the sandbox and everything in it. Safe to call twice; never raises for a sandbox that is already gone."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Makes sandboxes. One object serves one run; `run_id` marks what it made so that `sweep` finds what a crash left."""

    @property
    def name(self) -> str: ...

    async def create(self, *, run_id: str, lifetime_s: float) -> Sandbox:
        """A fresh sandbox with an empty workspace and no network unless the backend was told otherwise."""
        ...

    async def sweep(self, run_id: str) -> int:
        """Kill every sandbox of `run_id` that is still there; returns how many."""
        ...
