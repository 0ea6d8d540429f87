"""What everything in a local sandbox uses: memory, threads, sessions. Part of the supervisor; standard library only.

Memory that processes map is in their status. What none needs to map is found here too: memory files by the descriptors that hold them, System V objects
by the namespace's tables. What is both held and mapped is taken out again, at some cost, where it would exceed the limit.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

LIBC = ctypes.CDLL(None)

PR_SET_DUMPABLE = 4
IPC_RMID = 0

MFD_HUGETLB = 4
HUGE_SHIFTS = (21, 30)  # 2 MB and 1 GB, log2; the kernel takes them in bits 26 and up

SYSV: tuple[tuple[str, Callable[[int], int], tuple[str, ...], int], ...] = (
    # table, how the object is removed, columns that make up its size, bytes in one unit (a semaphore is one cache line)
    ("shm", lambda ident: LIBC.shmctl(ident, IPC_RMID, None), ("rss", "swap"), 1),
    ("msg", lambda ident: LIBC.msgctl(ident, IPC_RMID, None), ("cbytes",), 1),
    ("sem", lambda ident: LIBC.semctl(ident, 0, IPC_RMID), ("nsems",), 64),
)


class Census(NamedTuple):
    """Everything in the box but the supervisor."""

    memory: int
    """Bytes."""
    threads: int
    sessions: dict[int, int]
    """Process → its session."""
    hidden: list[int]
    """Processes that made their descriptors unreadable (PR_SET_DUMPABLE), where memory files could be."""


def set_dumpable(dumpable: bool) -> None:
    """Whether code of the same uid may trace this process and read its /proc. Raises `OSError`."""
    if LIBC.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0):
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def _memory_devices() -> frozenset[int]:
    """The kernel's own devices that memory files are on; a name would cost a second call for each descriptor, and lie."""
    found = set()
    for flags in (0, MFD_HUGETLB, *(MFD_HUGETLB | shift << 26 for shift in HUGE_SHIFTS)):
        with suppress(OSError):  # a kernel without huge pages of that size
            handle = os.memfd_create("device", flags)
            found.add(os.fstat(handle).st_dev)
            os.close(handle)
    return frozenset(found)


_DEVICES = _memory_devices()


def _files(task: str, found: dict[tuple[int, int], int]) -> bool:
    """Add the memory files that a thread's descriptors hold, by device and inode, in bytes. False where it lives and hides them."""
    try:
        for name in os.listdir(task + "/fd"):
            with suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
                info = os.stat(f"{task}/fd/{name}")
                if info.st_dev in _DEVICES:
                    found[info.st_dev, info.st_ino] = info.st_blocks * 512
    except PermissionError:
        with suppress(FileNotFoundError, ProcessLookupError):
            return b"RssAnon" not in _status(task)  # whoever is ending has no memory, and soon no descriptors
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return True


def _status(path: str) -> dict[bytes, bytes]:
    with open(path + "/status", "rb") as file:
        return dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)


def _twice(processes: Iterable[int], held: Collection[tuple[int, int]]) -> int:
    """Bytes of `held` that are in the processes' own figures too: it is mapped as well."""
    size, counts = 0, False
    for process in processes:
        with suppress(OSError), open(f"/proc/{process}/smaps", "rb") as file:
            for line in file:
                if b"-" in line.split(b" ", 1)[0]:  # a mapping: range, flags, offset, device, inode
                    _, flags, _, device, inode = line.split()[:5]
                    major, minor = (int(part, 16) for part in device.split(b":"))
                    counts = b"s" in flags and (os.makedev(major, minor), int(inode)) in held
                elif counts and line.startswith(b"Rss:"):
                    size += int(line.split()[1]) * 1024
    return size


def _count(limit: int) -> Census:
    memory, threads, sessions, hidden = 0, 0, {}, []
    files: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        path = f"/proc/{name}"
        try:
            lines = _status(path)
            count = int(lines.get(b"Threads", b"1"))
            threads += count
            sessions[int(name)] = int(lines.get(b"NSsid", b"0").split()[-1])
            # each thread may have descriptors of its own, and the first may have ended before the others, with its status empty then
            tasks = [f"{path}/task/{task}" for task in os.listdir(path + "/task")] if count > 1 else [path]
            for task in tasks:
                if b"RssAnon" not in lines:
                    with suppress(FileNotFoundError, ProcessLookupError):
                        lines = _status(task)
            memory += sum(int(lines[key].split()[0]) for key in (b"RssAnon", b"RssShmem") if key in lines) * 1024
            for task in tasks:
                if not _files(task, files) and int(name) not in hidden:
                    hidden.append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    kept = sysv()
    memory += sum(files.values()) + sum(item.size for item in kept)
    if memory > limit and (files or kept):
        # a segment's inode is its number, on the device that small memory files are on
        memory -= _twice(sessions, {*files, *((device, item.number) for item in kept for device in _DEVICES)})
    return Census(memory, threads, sessions, hidden)


def census(limit: int) -> Census:
    """Count; up to `limit` bytes of memory some of it may count twice. A process costs about 0.05 ms, an open descriptor 0.02 ms."""
    found = _count(limit)
    if found.memory > limit:  # what was detached or closed between two of its readings was in both: again
        found = min(found, _count(limit), key=lambda one: one.memory)
    return found


class Kept(NamedTuple):
    """A System V object: the kernel keeps it until somebody removes it."""

    number: int
    size: int
    """Bytes."""
    attached: bool
    remove: Callable[[], int]


def sysv() -> list[Kept]:
    """The shared memory, queues and semaphores of the box."""
    found = []
    for table, remove, columns, unit in SYSV:
        if not os.path.exists("/proc/sysvipc/" + table):
            continue  # a kernel built without
        with open("/proc/sysvipc/" + table) as file:
            names, *rows = (line.split() for line in file)
            for row in rows:
                size = sum(int(row[names.index(column)]) for column in columns) * unit
                attached = "nattch" in names and row[names.index("nattch")] != "0"
                found.append(Kept(int(row[1]), size, attached, partial(remove, int(row[1]))))
    return found


def remove_sysv(*, attached: bool) -> int:
    """Remove what no process attaches or, with `attached`, everything; returns how many bytes that were."""
    chosen = [item for item in sysv() if attached or not item.attached]
    for item in chosen:
        item.remove()  # one that another command removed meanwhile is as gone
    return sum(item.size for item in chosen)
