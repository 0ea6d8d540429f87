"""The `e2b` backend: one cloud machine per sandbox, by E2B's SDK, which is imported only when a sandbox is made.

Environment: E2B_API_KEY (required), E2B_DOMAIN, E2B_API_URL, E2B_SANDBOX_URL. Every machine carries its run id as metadata for `sweep`, and ends at its
lifetime on the server's side even when nobody asks. A template needs bash, python3 and a user called `user`, as E2B's own have.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import secrets
import shlex
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sandboxes.background import in_background
from sandboxes.base import (
    MAX_ARCHIVE_BYTES,
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    WORKSPACE,
    ExecResult,
    FileRefused,
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SandboxUnavailable,
)

if TYPE_CHECKING:
    from e2b import AsyncSandbox

RUN_KEY: Final = "agentexecutor_run"
"""Metadata key under which every machine carries its run id."""

HOME: Final = "/opt/agentexecutor"
"""Where `remote.py` is inside; only root writes there."""

NETWORK_S: Final = 30.0
"""How much longer than its own deadline a call over the network may take, in seconds."""

SOURCES: Final = ("boxfs", "remote")

GONE: Final = ("SandboxNotRunningException", "SandboxUnreachableException", "SandboxNotFoundException")
"""The first two are subclasses of the SDK's TimeoutException: they are asked for first."""


def translate(error: Exception) -> SandboxError:
    """Our error for one of the SDK's or of its HTTP client; by name, so that the SDK need not be there."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & set(GONE):
        return SandboxGone(f"The E2B sandbox is gone: {error}")
    if names & {"AuthenticationException"}:
        return SandboxUnavailable(f"E2B refuses the key in E2B_API_KEY ({error}); export a valid one.")
    if (
        names & {"TimeoutException", "TimeoutError"} or getattr(error, "exit_code", None) == -1
    ):  # -1 is a command that its timeout ended
        return SandboxTimeout(f"E2B did not answer in time: {error}")
    return SandboxError(f"E2B failed: {type(error).__name__}: {error}")


class E2BSandbox:
    """One machine; usable from any event loop of the process that made it."""

    def __init__(self, sdk: AsyncSandbox) -> None:
        self._sdk = sdk
        self._gone = self._killed = False

    @property
    def id(self) -> str:
        return str(self._sdk.sandbox_id)

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
        max_output: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        answer, _ = await self._ask(
            "run",
            {"command": command, "timeout_s": timeout_s, "env": dict(env or {}), "cwd": cwd, "max_output": max_output},
            deadline_s=timeout_s,
        )
        return ExecResult(
            exit_code=answer["exit_code"],
            stdout=base64.b64decode(answer["stdout"]).decode("utf-8", "replace"),
            stderr=base64.b64decode(answer["stderr"]).decode("utf-8", "replace"),
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
        answer, _ = await self._ask("quiesce", {}, user="root")
        if "left" in answer:
            raise SandboxError(f"{answer['left']} killed processes in the sandbox did not end.")

    async def export_workspace(self, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> bytes:
        return (await self._ask("export", {"max_bytes": max_bytes}))[1]

    async def import_workspace(self, archive: bytes) -> None:
        await self._ask("import", {"max_bytes": MAX_ARCHIVE_BYTES}, archive)

    async def kill(self) -> None:
        self._gone = True
        if not self._killed:
            with suppress(SandboxGone):  # it ended before us
                await in_background(self._guarded(self._sdk.kill(request_timeout=NETWORK_S), NETWORK_S))
            self._killed = True

    async def _ask(
        self,
        operation: str,
        header: dict[str, Any],
        payload: bytes | None = None,
        *,
        deadline_s: float = 0.0,
        user: str = "user",
    ) -> tuple[dict[str, Any], bytes]:
        if self._gone:
            raise SandboxGone("The E2B sandbox was killed.")
        deadline = deadline_s + NETWORK_S
        answer, data = await in_background(
            self._guarded(self._call(operation, header, payload, deadline, user), deadline)
        )
        if "refused" in answer:
            raise FileNotFoundError(answer["refused"]) if answer["missing"] else FileRefused(answer["refused"])
        return answer, data

    async def _guarded(self, work: Any, deadline_s: float) -> Any:
        """`work` with a deadline of our own (the SDK's do not cover everything) and its errors translated."""
        try:
            async with asyncio.timeout(deadline_s):
                return await work
        except (SandboxError, asyncio.CancelledError):
            raise
        except TimeoutError:
            raise SandboxTimeout(f"E2B did not answer within {deadline_s:g} s.") from None
        except Exception as error:  # the SDK's errors have no common base, and its HTTP client's come through
            ours = translate(error)
            self._gone = self._gone or isinstance(ours, SandboxGone)
            raise ours from error

    async def _call(
        self, operation: str, header: dict[str, Any], payload: bytes | None, deadline_s: float, user: str
    ) -> tuple[dict[str, Any], bytes]:
        token = secrets.token_hex(8)
        request, sent = f"/tmp/agentexecutor-{token}.json", f"/tmp/agentexecutor-{token}.bin"
        if payload is not None:
            await self._sdk.files.write(sent, payload, user=user, use_octet_stream=True, request_timeout=deadline_s)
        body = json.dumps({"op": operation, "workspace": WORKSPACE, "payload": sent, **header}).encode()
        await self._sdk.files.write(request, body, user=user, use_octet_stream=True, request_timeout=deadline_s)
        program = f"import sys; sys.path.insert(0, {HOME!r}); from sandboxes.remote import main; main()"
        line = f"python3 -I -S -B -c {shlex.quote(program)} {request}"
        try:
            done = await self._sdk.commands.run(line, user=user, timeout=deadline_s, request_timeout=deadline_s)
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError as error:
            raise SandboxError(
                f"The E2B sandbox answered `{operation}` with something else than JSON ({error})."
            ) from None
        if "fetch" not in answer:
            return answer, b""
        data = bytes(await self._sdk.files.read(answer["fetch"], format="bytes", user=user, request_timeout=deadline_s))
        await self._sdk.files.remove(answer["fetch"], user=user, request_timeout=deadline_s)
        return answer, data

    async def set_up(self) -> None:
        """Put the workspace and `remote.py` there. Runs in the background loop."""
        folder = Path(__file__).parent
        files = {f"{HOME}/sandboxes/__init__.py": b""}
        files |= {f"{HOME}/sandboxes/{name}.py": (folder / f"{name}.py").read_bytes() for name in SOURCES}
        for path, content in files.items():
            await self._sdk.files.write(path, content, user="root", use_octet_stream=True, request_timeout=NETWORK_S)
        line = f"mkdir -p {WORKSPACE} && chown user {WORKSPACE} && command -v python3 bash"
        await self._sdk.commands.run(line, user="root", timeout=NETWORK_S, request_timeout=NETWORK_S)


class E2BBackend:
    """Makes E2B cloud sandboxes.

    Args:
        template: E2B template; empty is E2B's default.
        domain: domain of a self-hosted control plane; empty is E2B_DOMAIN or E2B's own.
        network: whether commands reach the internet.
    """

    name: Final = "e2b"

    def __init__(self, *, template: str = "", domain: str = "", network: bool = False) -> None:
        self.template, self.network = template, network
        self._options: dict[str, Any] = {"domain": domain} if domain else {}

    def _sdk(self) -> Any:
        if not os.environ.get("E2B_API_KEY"):
            raise SandboxUnavailable(
                "E2B needs a key: `export E2B_API_KEY=…` (from the E2B dashboard), or use `--backend local`."
            )
        try:
            import e2b
        except ImportError:
            raise SandboxUnavailable("E2B's SDK is not installed here: run `python3 scripts/setup_env.py`.") from None
        return e2b

    async def create(self, *, run_id: str, lifetime_s: float) -> E2BSandbox:
        """A fresh machine. Raises `SandboxUnavailable` without a valid key."""
        return await in_background(self._create(self._sdk(), run_id, lifetime_s))

    async def _create(self, e2b: Any, run_id: str, lifetime_s: float) -> E2BSandbox:
        try:
            machine = await e2b.AsyncSandbox.create(
                template=self.template or None,
                timeout=math.ceil(lifetime_s),
                metadata={RUN_KEY: run_id},
                allow_internet_access=self.network,
                idempotency_key=uuid.uuid4().hex,  # the SDK repeats a request that got no answer; this keeps it one machine
                **self._options,
            )
        except Exception as error:  # see `_guarded`
            raise translate(error) from error
        box = E2BSandbox(machine)
        try:
            await box._guarded(box.set_up(), 4 * NETWORK_S)
        except BaseException:
            await asyncio.shield(box._guarded(machine.kill(request_timeout=NETWORK_S), NETWORK_S))
            raise
        return box

    async def sweep(self, run_id: str) -> int:
        """Kill every machine that carries `run_id`; returns how many were still there."""
        return await in_background(self._sweep(self._sdk(), run_id))

    async def _sweep(self, e2b: Any, run_id: str) -> int:
        killed = 0
        try:
            pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata={RUN_KEY: run_id}), **self._options)
            while pages.has_next:
                for info in await pages.next_items():
                    killed += bool(await e2b.AsyncSandbox.kill(info.sandbox_id, **self._options))
        except Exception as error:  # see `_guarded`
            raise translate(error) from error
        return killed
