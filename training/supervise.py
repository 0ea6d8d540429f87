"""Run children so that their exit is believed, their output is kept, and nothing of them survives.

Between us and the child stands `training/keeper.py`, which ends the whole tree when the child ends, when we ask, and when we die. The child writes
into the log file itself, so that nothing is lost with us; we read along. Everything here works from any thread and with any exception, also
those that are no `Exception` (KeyboardInterrupt, Prefect's TerminationSignal): a context manager's exit ends the tree.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from configs.errors import UserError, WorkFailed
from training.keeper import descendants
from training.launch import Command

KEEPER: Final = Path(__file__).with_name("keeper.py")
GRACE_S: Final = 15.0
"""Seconds from TERM to KILL: well under the 30 s after which a Prefect worker kills us."""
KILL_S: Final = 5.0
"""Seconds that the kernel gets to end a killed process; one stuck in a device call is left behind after them."""
POLL_S: Final = 0.2
MEASURE_S: Final = 0.5
"""Seconds between two measurements of the tree's memory, at least."""
TAIL_LINES: Final = 200
_TORCHRUN: Final = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.*failed \(exitcode")
"""The line that begins torchrun's report: 40 lines that push the reason out of sight."""
MAX_LINE: Final = 4000
"""Characters of a line that are passed on; the file has it whole."""
_READ: Final = 1 << 20
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

OnLine = Callable[[str], None]


@dataclass
class Child:
    """A running child. Made by `spawn_child`; `poll` reads its output along and must be called now and then."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    on_line: OnLine | None
    started: float = field(default_factory=time.monotonic)
    lines: int = 0
    peak_bytes: int = 0
    """Largest memory of the whole tree seen: a page that several processes share counts once (PSS). See `_measure`."""
    last_output: float = field(default_factory=time.monotonic)
    seen: dict[int, str] = field(default_factory=dict)
    """Every process of the tree met so far: pid → start time, so that a reused pid is not taken for it."""
    _measured: tuple[float, int] = (0.0, 0)
    """When the tree's memory was measured last, and its resident sum then."""
    _reader: IO[bytes] | None = None
    _rest: bytes = b""
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """Pass new lines on and watch the tree. The exit code once the child and its whole tree have ended, else None."""
        code = self.process.poll()
        if code is None:
            self._watch()
        self._read(final=code is not None)
        return code

    def tail(self, lines: int = 30) -> str:
        """The last lines of the output; redrawn progress bars, and torchrun's own report after a rank's traceback, are left out."""
        kept = list(self._tail)
        report = next((place for place, line in enumerate(kept) if _TORCHRUN.search(line)), 0)
        return "\n".join((kept[:report] or kept)[-lines:])

    def check(self) -> None:
        """Raises `WorkFailed` with the log's tail when the child has ended: a server is not supposed to."""
        code = self.poll()
        if code is not None:
            raise self.failed(f"ended with exit code {code} after {self.seconds:.0f} s")

    def failed(self, what: str) -> WorkFailed:
        return WorkFailed(f"{self.name} {what}. The whole output is in {self.log}; its last lines:\n{self.tail()}")

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the whole tree: asked first, killed after the keeper's grace. Returns when nothing of it is left."""
        if self.process.poll() is None:
            self._watch()
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s + 5.0)
        self._sweep()
        self.process.poll()
        self._read(final=True)

    def _sweep(self) -> None:
        """KILL what is left and wait for it. Finds something only where the keeper itself was killed or is stuck."""
        end = time.monotonic() + KILL_S
        while time.monotonic() < end:
            alive = [pid for pid, since in self.seen.items() if _start_time(pid) == since]
            if self.process.poll() is None:
                alive.append(self.process.pid)
            if not alive:
                return
            for pid in {*alive, *(below for root in alive for below in descendants(root))}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _watch(self) -> None:
        pids = descendants(self.process.pid)
        for pid in pids:
            since = _start_time(pid)
            if since:
                self.seen[pid] = since
        self._measure(pids)

    def _measure(self, pids: list[int]) -> None:
        """A process's proportional share costs 12 ms a GiB to read, its resident size 0.06 ms: the first is read where the second grew by 2%."""
        resident, now = sum(map(_rss_bytes, pids)), time.monotonic()
        if resident > 1.02 * self._measured[1] and now - self._measured[0] > MEASURE_S:
            self.peak_bytes = max(self.peak_bytes, sum(map(_pss_bytes, pids)))
            self._measured = (now, resident)

    def _read(self, *, final: bool) -> None:
        if self._reader is None:
            return
        while chunk := self._reader.read(_READ):
            self.last_output = time.monotonic()
            *complete, self._rest = re.split(rb"(?<=[\r\n])", self._rest + chunk)
            redrawn = ""
            for raw in complete:
                line = raw.decode("utf-8", "replace").rstrip()[:MAX_LINE]
                if not line:
                    continue
                if raw.endswith(b"\r"):
                    redrawn = line  # a progress bar: only the newest state is news
                    continue
                self._pass_on(line)
                redrawn = ""
            if redrawn and self.on_line:
                self.on_line(redrawn)
        if final and self._rest:
            rest, self._rest = self._rest, b""
            self._pass_on(rest.decode("utf-8", "replace").rstrip()[:MAX_LINE])

    def _pass_on(self, line: str) -> None:
        self.lines += 1
        self._tail.append(line)
        if self.on_line:
            self.on_line(line)


@dataclass(frozen=True, slots=True)
class Finished:
    log: Path
    seconds: float
    lines: int
    peak_bytes: int


@contextmanager
def spawn_child(
    command: Command,
    log: Path,
    *,
    name: str = "",
    on_line: OnLine | None = None,
    grace_s: float = GRACE_S,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a child and hand it out; on the way out, however that happens, its whole tree is ended. The log is appended to."""
    if not sys.platform.startswith("linux"):
        raise UserError("training and serving need Linux: children are supervised through /proc and prctl.")
    if not Path(command.argv[0]).exists():
        raise UserError(
            f"{command.argv[0]}: there is no such interpreter; make it with `python3 scripts/setup_env.py`, or set paths.train_python."
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    # Buffered opening would hold lines back; the reader starts where this child's own output starts.
    with log.open("ab") as writer, log.open("rb", buffering=0) as reader:
        reader.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid()), str(grace_s), "--", *command.argv],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.STDOUT,
            cwd=command.cwd,
            env=command.environment(environ),
            start_new_session=True,  # Ctrl-C in a terminal reaches us alone; we end the tree in order
        )
        child = Child(name or Path(command.argv[-1]).name, log, process, on_line, _reader=reader)
        try:
            yield child
        finally:
            child.on_line = None  # a listener that raised must not raise again while the tree is ended
            child.stop(grace_s)


def run_child(
    command: Command,
    log: Path,
    *,
    name: str = "",
    on_line: OnLine | None = None,
    expect: Callable[[], str | None] | None = None,
    grace_s: float = GRACE_S,
    timeout_s: float | None = None,
    stall_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Finished:
    """Run a child to its end.

    `on_line` gets every line (of a redrawn progress bar only the newest state), and what it raises ends the tree and is passed on. `expect` says in
    words what is missing after exit code 0. `timeout_s` bounds the whole run and `stall_s` the time without output. Raises `WorkFailed` with the log's tail.
    """
    with spawn_child(command, log, name=name, on_line=on_line, grace_s=grace_s, environ=environ) as child:
        while (code := child.poll()) is None:
            if timeout_s is not None and child.seconds > timeout_s:
                raise child.failed(f"was ended after its {timeout_s:g} s")
            if stall_s is not None and time.monotonic() - child.last_output > stall_s:
                raise child.failed(f"was ended: it wrote nothing for {stall_s:g} s")
            time.sleep(POLL_S)
        if code != 0:
            raise child.failed(
                f"failed with exit code {code}"
                + (f" (signal {signal.Signals(code - 128).name})" if 128 < code < 160 else "")
            )
        missing = expect() if expect else None
        if missing:
            raise child.failed(f"ended with exit code 0, but {missing}")
        return Finished(log, child.seconds, child.lines, child.peak_bytes)


def _start_time(pid: int) -> str:
    """Start time of a live process in clock ticks; empty when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _pss_bytes(pid: int) -> int:
    """Proportional set size; the resident size where it cannot be read (another user's process)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.split("\nPss:", 1)[1].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return _rss_bytes(pid)
