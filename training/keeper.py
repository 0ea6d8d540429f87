"""A tiny process between a supervisor and its child that outlives neither: run as `python -I -S keeper.py PARENT_PID GRACE_S -- command …`.

It is standard library only and single-threaded. It adopts every orphan of the tree below it (PR_SET_CHILD_SUBREAPER), so that the ranks of a dead
launcher, which have sessions of their own, are still its descendants. The tree ends when the child ends, when the keeper gets SIGTERM, or when its
parent is gone: TERM to all, then KILL to what is left after the grace. Watching the parent's pid, unlike a parent-death signal, does not depend
on the *thread* that started us (Prefect runs tasks in threads). The exit code is the child's, or 128 + the signal that ended it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1

_asked = False


def _ask(number: int, frame: object) -> None:
    global _asked
    _asked = True


def descendants(root: int) -> list[int]:
    """Live descendants of `root` by parent pid, zombies left out; works across sessions and process groups."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _reap(child: int) -> int | None:
    """Collect every dead child; the exit code of `child` when it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            found = os.waitstatus_to_exitcode(status)
            code = found if found >= 0 else 128 - found


def _start(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # one started with `&` from a script inherits ignored ones
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: cannot be started: {error.strerror}\n".encode())
        os._exit(127)


def main() -> int:
    parent, grace = int(sys.argv[1]), float(sys.argv[2])
    argv = sys.argv[4:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ask)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    child = _start(argv)
    code: int | None = None
    while code is None and not _asked and os.getppid() == parent:
        time.sleep(POLL_S)
        code = _reap(child)
    told: set[int] = set()
    end = time.monotonic() + grace
    while alive := descendants(os.getpid()):
        if time.monotonic() < end:
            _signal_all([pid for pid in alive if pid not in told], signal.SIGTERM)
            told.update(alive)
        else:
            _signal_all(alive, signal.SIGKILL)
        time.sleep(POLL_S / 2)
        found = _reap(child)
        code = found if code is None else code
    found = _reap(child)
    code = found if code is None else code
    return code if code is not None else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
