"""One command in a local sandbox. Part of the supervisor; standard library only."""

from __future__ import annotations

import os
import time
from contextlib import suppress

SCRIPT_BYTES = 128 * 1024 - 1
"""Longest command: the kernel's limit for one argument."""


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


def refusal(script: bytes) -> str | None:
    """Why no shell can take `script`, if so."""
    if b"\0" in script:
        return "holds a NUL byte"
    return (
        f"is longer than {SCRIPT_BYTES} bytes; write it to a file and run that" if len(script) > SCRIPT_BYTES else None
    )


def close_handles(*, but: int) -> None:
    """Close every descriptor of this process but one and the three that a command gets."""
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle > 2 and handle != but:
            with suppress(OSError):  # the listing's own is closed already
                os.close(handle)
