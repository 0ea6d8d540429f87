"""PID 1 of a local sandbox: runs commands, watches the box's limits, does the file calls. Standard library only, Python 3.8 or newer.

It is copied into the box and talks over one inherited socket in frames (`frames.py`). One thread and one selector: nothing a command does can block
it. It dies when the socket closes, at the end of the lifetime, or with bubblewrap; the kernel then kills every other process of the box.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn

from sandboxes import boxfs, frames
from sandboxes.census import census, remove_sysv, set_dumpable
from sandboxes.command import Command, Stream, close_handles, refusal

TICK_S = 0.05
"""Between two looks at the box's memory, processes and files while any process runs; more where a look is long (`LOOK_SHARE`)."""

LOOK_SHARE = 5
"""A look takes at most one in so many parts of the time, however many descriptors the box opens."""

LINGER_S = 0.2
"""How long output is still collected after the shell has exited while a background child holds the pipe."""

KILL_WAIT_S = 5.0
"""How long killed processes may take to vanish before the supervisor says so."""

FLOOD_BYTES = 64 * 1024 * 1024
"""Output of one command after which it is killed: nobody reads it, and draining it costs a core."""

MAX_INODES = 100_000
"""Most files in the writable trees together; an empty file costs kernel memory that no size limit sees."""


class Supervisor:
    def __init__(self, link: socket.socket, options: dict[str, Any]) -> None:
        self.link, self.options = link, options
        self.ends = time.monotonic() + options["lifetime_s"]
        self.inbox, self.outbox = frames.Inbox(), bytearray()
        self.commands: dict[int, Command] = {}
        self.selector = selectors.DefaultSelector()
        self.alive, self.look_at, self.crowded, self.strikes, self.inodes = False, 0.0, 0, 0, 0
        self.quieting: int | None = None
        self.quiet_deadline = 0.0
        wake_read, wake_write = os.pipe()
        for handle in (wake_read, wake_write):
            os.set_blocking(handle, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: os.read(wake_read, 4096))
        link.setblocking(False)
        self.selector.register(link, selectors.EVENT_READ, self.talk)
        self.operations: dict[str, Callable[[int, dict[str, Any], bytes], None]] = {
            "run": self.run,
            "quiesce": self.quiesce,
            "read": lambda i, h, _: self.reply(i, {}, boxfs.read(self.resolve(h["path"]), h["max_bytes"])),
            "write": self.write,
            "export": lambda i, h, _: self.reply(i, {}, boxfs.pack(options["workspace"], h["max_bytes"])),
            "import": self.unpack,
        }

    def write(self, ident: int, header: dict[str, Any], payload: bytes) -> None:
        boxfs.write(self.resolve(header["path"]), payload)
        self.reply(ident, {})

    def unpack(self, ident: int, header: dict[str, Any], payload: bytes) -> None:
        boxfs.unpack(self.options["workspace"], payload, header["max_bytes"])
        self.reply(ident, {})

    def resolve(self, path: str) -> str:
        return os.path.join(self.options["workspace"], path)

    # --- the link -------------------------------------------------------------------------------------------------------------------------------

    def reply(self, ident: int, header: dict[str, Any], payload: bytes | None = None) -> None:
        self.outbox += frames.pack({"id": ident, **header}, payload or b"")
        self.flush()

    def flush(self) -> None:
        try:
            while self.outbox:
                with memoryview(self.outbox) as view:
                    sent = self.link.send(view[: 1 << 20])
                del self.outbox[:sent]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)
        self.selector.modify(self.link, wanted, self.talk)

    def talk(self) -> None:
        if self.outbox:
            self.flush()
        try:
            data = self.link.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)  # the host is gone
        for header, payload in self.inbox.feed(data):
            ident = header["id"]
            try:
                self.operations[header["op"]](ident, header, payload)
            except boxfs.Refused as error:
                self.reply(ident, {"refused": str(error), "missing": error.missing})
            except (OSError, MemoryError, RecursionError) as error:
                self.reply(ident, {"failed": f"{type(error).__name__}: {error}"})

    # --- commands -------------------------------------------------------------------------------------------------------------------------------

    def run(self, ident: int, header: dict[str, Any], _: bytes) -> None:
        script = header["command"].encode("utf-8", "surrogateescape")
        if why := refusal(script):
            answer = {"exit_code": 126, "seconds": 0.0, "timed_out": False, "dropped": 0, "split": 0}
            self.reply(ident, answer, f"the command {why}\n".encode())
            return
        if self.alive and census(self.options["memory_bytes"]).threads >= self.options["processes"] - 1:
            self.kill_all("")  # an earlier command filled the process table; nothing could start beside it
        self.inodes = self.names()
        pipes, (closed, closing) = [os.pipe(), os.pipe()], os.pipe()
        pid = os.fork()
        if pid == 0:
            self.become(script, [*(write for _, write in pipes), closing], header)
        os.close(closing)
        os.read(closed, 1)  # until the child has closed what is ours: from then on a look can see what it holds
        os.close(closed)
        streams: list[Stream] = []
        command = Command(ident, pid, streams, header["timeout_s"])
        for read, write in pipes:
            os.close(write)
            os.set_blocking(read, False)
            stream = Stream(read, header["max_output"])
            streams.append(stream)
            self.selector.register(read, selectors.EVENT_READ, lambda s=stream: self.take(command, s))
        self.commands[pid] = command
        self.alive = True

    def become(self, script: bytes, outputs: list[int], header: dict[str, Any]) -> NoReturn:
        """In the forked child: turn into the shell."""
        try:
            os.setsid()
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(outputs[0], 1)
            os.dup2(outputs[1], 2)
            signal.set_wakeup_fd(-1)
            close_handles(but=outputs[2])  # above all the link: whoever writes to it answers in our name
            set_dumpable(True)  # only now is there nothing to take from this process
            os.close(outputs[2])
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(os.path.join(self.options["workspace"], header["cwd"]))
            env = {**self.options["env"], **header["env"]}
            for name, value in self.options["limits"].items():
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
            os.execve(b"/bin/bash", [b"bash", b"-c", script], {os.fsencode(k): os.fsencode(v) for k, v in env.items()})
        except BaseException as error:
            os.write(2, f"the command could not start: {error}\n".encode("utf-8", "replace"))
        os._exit(126)

    def take(self, command: Command, stream: Stream) -> None:
        stream.take()
        if not stream.open:
            self.selector.unregister(stream.handle)
            os.close(stream.handle)
        if sum(s.seen for s in command.streams) > FLOOD_BYTES and not command.note:
            command.note = f"more than {FLOOD_BYTES >> 20} MB of output: the command was killed"
            self.kill_session(command.pid)

    def finish(self, command: Command) -> None:
        command.replied = True
        code = command.status if command.status is not None else -signal.SIGKILL
        kept = [bytes(stream.kept) for stream in command.streams]
        if command.note:
            kept[1] += f"\n[sandbox] {command.note}\n".encode()
        header = {
            "exit_code": 124 if command.timed_out else 128 - code if code < 0 else code,
            "timed_out": command.timed_out,
            "seconds": time.monotonic() - command.started,
            "dropped": sum(s.seen - len(s.kept) for s in command.streams),
            "split": len(kept[0]),
        }
        self.reply(command.ident, header, kept[0] + kept[1])
        for stream in command.streams:
            stream.limit = 0

    # --- processes ------------------------------------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        while self.alive:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alive = False
                return
            if not pid:
                return
            if pid in self.commands:
                command = self.commands[pid]
                command.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                command.ended = time.monotonic()

    def names(self) -> int:
        """Files and directories in the writable trees."""
        return sum(tree.f_files - tree.f_ffree for tree in map(os.statvfs, self.options["writable"]))

    def kill_session(self, leader: int) -> None:
        self.kill(
            [
                leader,
                *(pid for pid, session in census(self.options["memory_bytes"]).sessions.items() if session == leader),
            ]
        )

    def kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_all(self, note: str) -> None:
        self.remark(note)
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def quiesce(self, ident: int, _: dict[str, Any], __: bytes) -> None:
        self.kill_all("")
        self.quieting, self.quiet_deadline = ident, time.monotonic() + KILL_WAIT_S

    # --- the clock ------------------------------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Enforce what no rlimit can: the memory, the threads and the number of files of the whole box."""
        if not self.alive or now < self.look_at:
            return
        memory, threads, sessions, hidden = census(self.options["memory_bytes"])
        self.look_at = now + max(TICK_S, LOOK_SHARE * (time.monotonic() - now))
        if hidden:
            self.kill(hidden)
            self.remark("a process hid what it holds (PR_SET_DUMPABLE) and was killed")
        self.crowded = self.crowded + 1 if threads >= self.options["processes"] - 1 else 0
        names = self.names()
        grew, self.inodes = names > self.inodes, names
        tests = (
            (memory > self.options["memory_bytes"], f"memory limit of {self.options['memory_bytes'] >> 20} MB"),
            (self.crowded >= 3, f"limit of {self.options['processes']} processes"),
            (
                names > MAX_INODES and grew,
                f"limit of {MAX_INODES} files",
            ),  # `grew` lets a command that removes files run
        )
        broken = next((limit for over, limit in tests if over), None)
        if broken is None:
            self.strikes = 0
            return
        running = {pid for pid, command in self.commands.items() if not command.replied}
        background = [pid for pid, session in sessions.items() if session not in running]
        self.strikes += 1
        # what an earlier command left goes first: the running one may be innocent
        self.kill(background if self.strikes <= 3 else ())
        if self.strikes <= 3 and (remove_sysv(attached=False) or background):
            self.remark(
                f"{broken} reached: what ran in the background was killed, and System V objects left were removed"
            )
        else:
            self.kill_all(f"{broken} reached: every process was killed")
            remove_sysv(attached=True)

    def remark(self, note: str) -> None:
        for command in self.commands.values():
            command.note = command.note or note

    def step(self) -> None:
        now = time.monotonic()
        if now >= self.ends:
            self.reply(0, {"gone": f"it reached its lifetime of {self.options['lifetime_s']:g} s"})
            os._exit(0)
        self.reap()
        self.look(now)
        for pid, command in list(self.commands.items()):
            drained = not any(stream.open for stream in command.streams)
            if not command.replied:
                if command.status is None and now >= command.deadline and not command.timed_out:
                    command.timed_out = True
                    self.kill_session(pid)
                over = command.ended is not None and (drained or now >= command.ended + LINGER_S)
                if over or now >= command.deadline + KILL_WAIT_S:
                    self.finish(command)
            if command.replied and drained and command.status is not None:
                del self.commands[pid]
        if self.quieting is not None and (not self.alive or now >= self.quiet_deadline):
            self.reply(self.quieting, {"left": census(self.options["memory_bytes"]).threads} if self.alive else {})
            self.quieting = None

    def serve(self) -> NoReturn:
        self.reply(0, {"ready": True})
        while True:
            wait = min(TICK_S, max(0.0, self.ends - time.monotonic())) if self.alive else self.ends - time.monotonic()
            for key, _ in self.selector.select(max(0.0, wait)):
                key.data()
            self.step()


def main() -> NoReturn:
    """Entry in the box: `argv[1]` is the socket's descriptor, `argv[2]` the options as JSON."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine itself runs out, the box goes first
    set_dumpable(False)  # code of the same uid may neither trace PID 1, nor read its /proc, nor take its descriptors
    link = int(sys.argv[1])
    os.set_inheritable(link, False)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # the kernel shields PID 1 from signals it has no handler for, so have none
    sys.setrecursionlimit(20_000)  # PATH_MAX allows trees of 2,000 levels, and shutil walks them by recursion
    Supervisor(socket.socket(fileno=link), frames.loads(sys.argv[2])).serve()
