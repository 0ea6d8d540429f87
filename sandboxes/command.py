"""One command in a local sandbox, and what everything in the box uses. Part of the supervisor; standard library only."""

from __future__ import annotations

import os
import time


class Stream:
    """One pipe of a command: what is kept of it and how much came."""

    def __init__(self, handle: int, limit: int) -> None:
        self.handle, self.limit, self.kept, self.seen, self.open = handle, limit, bytearray(), 0, True

    def take(self) -> None:
        try:
            data = os.read(self.handle, 65536)
        except BlockingIOError:
            return
        self.open = bool(data)
        self.seen += len(data)
        self.kept += data[: max(0, self.limit - len(self.kept))]


class Command:
    """One running command; it stays known after its reply while a background child still writes into its pipes."""

    def __init__(self, ident: int, pid: int, streams: list[Stream], timeout: float) -> None:
        self.ident, self.pid, self.streams, self.started = ident, pid, streams, time.monotonic()
        self.deadline = self.started + timeout
        self.status: int | None = None
        self.ended: float | None = None
        self.timed_out = self.replied = False
        self.note = ""


def census() -> tuple[int, int, dict[int, int]]:
    """Memory in bytes, threads, and the session of each process, over everything in the box but the supervisor."""
    memory, threads, sessions = 0, 0, {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        except OSError:
            continue  # it ended meanwhile
        memory += sum(int(lines[key].split()[0]) for key in (b"RssAnon", b"RssShmem") if key in lines) * 1024
        threads += int(lines.get(b"Threads", b"1"))
        sessions[int(name)] = int(lines.get(b"NSsid", b"0").split()[-1])
    return memory, threads, sessions
