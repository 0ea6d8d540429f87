"""Grading: a fresh sandbox, the agent's files, then the task's own checks over them. The exit code of the verifier's command is the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from agents.planted import restored, without_planted
from agents.task import Task
from agents.tools import call_deadline
from agents.trajectory import Outcome, Verdict
from sandboxes.base import FileRefused, Sandbox, SandboxError, SandboxTimeout
from sandboxes.pool import SandboxPool

SETUP_TIMEOUT_S: Final = 300.0
"""Deadline of one set-up command, in seconds."""

FILES_TIMEOUT_S: Final = 60.0
"""Deadline of one file call or of moving the workspace, in seconds."""

DETAIL_CHARS: Final = 2000
"""Characters of the verifier's output that are kept, from its end."""

ENVIRONMENT: Final = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}


async def prepare(task: Task, box: Sandbox, *, files_s: float = FILES_TIMEOUT_S) -> None:
    """Put the task's files into a fresh sandbox and run its set-up. Raises `SandboxError`, also when a set-up command fails."""
    await _put(box, task.files, files_s)
    for command in task.setup:
        async with _deadline(call_deadline(SETUP_TIMEOUT_S), box, "a set-up command"):
            done = await box.run(command, timeout_s=SETUP_TIMEOUT_S)
        if done.exit_code:
            raise SandboxError(
                f"set-up of task {task.id} failed: {command!r} exited {done.exit_code}: {(done.stdout + done.stderr)[-300:]}"
            )


async def take_workspace(box: Sandbox, *, files_s: float = FILES_TIMEOUT_S) -> bytes:
    """The agent's files, after everything that it left running is dead. Raises `FileRefused` when they are too large, and `SandboxError`."""
    async with _deadline(files_s, box, "the export of the workspace"):
        await box.quiesce()
        return await box.export_workspace()


async def grade(task: Task, archive: bytes, pool: SandboxPool, *, files_s: float = FILES_TIMEOUT_S) -> Outcome:
    """Grade an agent's workspace. Raises `SandboxError` when the infrastructure failed: nothing is known about the agent then."""
    async with pool.sandbox() as box:
        if task.setup:
            await prepare(task, box, files_s=files_s)  # for what set-up does outside the workspace
        try:
            async with _deadline(files_s, box, "the import of the workspace"):
                await box.import_workspace(without_planted(task, archive))
        except FileRefused as error:
            return Outcome(verdict=Verdict.FAILED, reason=f"the workspace cannot be graded: {error}")
        await _put(box, {**restored(task), **task.verifier.files}, files_s)
        timeout_s = task.verifier.timeout_s
        async with _deadline(call_deadline(timeout_s), box, "the verifier"):
            done = await box.run(task.verifier.command, timeout_s=timeout_s, env=ENVIRONMENT)
    detail = (done.stdout + done.stderr)[-DETAIL_CHARS:]
    if done.timed_out:
        return Outcome(verdict=Verdict.FAILED, reason=f"the checks did not end within {timeout_s:g} s", detail=detail)
    if done.exit_code:
        return Outcome(verdict=Verdict.FAILED, reason=f"the checks exited {done.exit_code}", detail=detail)
    return Outcome(verdict=Verdict.PASSED, detail=detail)


async def _put(box: Sandbox, files: Mapping[str, str], files_s: float) -> None:
    """Write the task's own files. Raises `SandboxError` also where one is refused: that is never the agent's fault."""
    for path, text in files.items():
        try:
            async with _deadline(files_s, box, f"writing {path}"):
                await box.write_file(path, text.encode())
        except FileRefused as error:
            raise SandboxError(f"sandbox {box.id}: the task's own file {path!r} cannot be written: {error}") from error


class _deadline:
    """`asyncio.timeout` whose expiry is the sandbox's failure and says what hung."""

    def __init__(self, seconds: float, box: Sandbox, what: str) -> None:
        self.seconds, self.box, self.what = seconds, box, what
        self.timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self.timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self.timeout.__aexit__(kind, error, None)
        except TimeoutError as expired:
            raise SandboxTimeout(
                f"sandbox {self.box.id}: {self.what} did not end within {self.seconds:g} s"
            ) from expired
