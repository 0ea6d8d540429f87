"""One small file for each local sandbox that exists, so that a later process finds what a crash has left: `<root>/<run>/<id>.json`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from sandboxes.base import SandboxUnavailable


def default_root() -> Path:
    """The folder of this user's records below the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"agentexecutor-{os.geteuid()}"


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: with the pid it names one process for good. None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class Records:
    """The records below one root. Raises `SandboxUnavailable` when the root is not ours: its records say which processes to kill."""

    def __init__(self, root: Path | None) -> None:
        self.root = root or default_root()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.root.lstat()
        except OSError as error:
            raise SandboxUnavailable(
                f"{self.root}: cannot hold the sandboxes' records ({error.strerror}); set TMPDIR to a writable folder."
            ) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise SandboxUnavailable(
                f"{self.root}: must be a folder of your own that nobody else can write to; remove it, or set TMPDIR."
            )

    def folder(self, run_id: str) -> Path:
        """The folder of one run; any string is a run id."""
        name = quote(run_id, safe="")
        return (
            self.root
            / f"run-{name if len(name) < 150 else name[:100] + hashlib.sha256(run_id.encode()).hexdigest()[:32]}"
        )

    def write(self, run_id: str, ident: str, pid: int) -> Path:
        """Record that process `pid` holds a sandbox of `run_id`."""
        path = self.folder(run_id) / f"{ident}.json"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(
            json.dumps(
                {
                    "run_id": run_id,
                    "pid": pid,
                    "started": _started(pid),
                    "owner": os.getpid(),
                    "owner_started": _started(os.getpid()),
                }
            )
        )
        return path

    def erase(self, path: Path) -> None:
        """Forget a sandbox that has ended."""
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    def prune(self) -> int:
        """End what processes that are no longer there have left, of any run; returns how many were still alive."""
        return sum(self._end(path, orphans_only=True) for path in self.root.glob("run-*/*.json"))

    def sweep(self, run_id: str) -> int:
        """End every recorded sandbox of a run; returns how many were still alive."""
        return sum(self._end(path, orphans_only=False) for path in self.folder(run_id).glob("*.json"))

    def _end(self, path: Path, *, orphans_only: bool) -> bool:
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            return False  # another process was faster
        except ValueError:
            self.erase(path)  # its writer died in the middle; without a connection the box has ended
            return False
        if orphans_only and _started(record["owner"]) == record["owner_started"]:
            return False
        alive = record["started"] is not None and _started(record["pid"]) == record["started"]
        if alive:
            with suppress(ProcessLookupError):
                os.kill(record["pid"], signal.SIGKILL)
            deadline = time.monotonic() + 2.0
            while _started(record["pid"]) == record["started"] and time.monotonic() < deadline:
                time.sleep(0.005)
        self.erase(path)
        return alive
