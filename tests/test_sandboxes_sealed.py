"""Commands in the local sandbox can neither answer in the supervisor's name nor hide memory from its limit."""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import SandboxGone, frames
from sandboxes.box import Box
from sandboxes.local import LocalBackend, LocalSandbox


@pytest.fixture
async def box() -> AsyncIterator[LocalSandbox]:
    made = await LocalBackend(memory_mb=128, processes=64, disk_mb=32).create(run_id="sealed", lifetime_s=120)
    yield made
    await made.kill()


def python(program: str) -> str:
    return f"python3 - <<'END'\n{program}\nEND"


# --- the link ---------------------------------------------------------------------------------------------------------------------------------


async def test_a_command_inherits_only_its_three_descriptors(box: LocalSandbox) -> None:
    await box.run("sleep 100 & sleep 100 >/dev/null 2>&1 & true")  # pipes of another command are open in the supervisor
    seen = await box.run("exec python3 -c \"import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))\"")
    assert seen.stdout == "[0, 1, 2, 3]\n"  # 3 is the listing's own
    assert "socket" not in (await box.run("ls -l /proc/self/fd /proc/*/fd")).stdout


FORGE = """
import ctypes, json, os, socket, stat, struct
libc = ctypes.CDLL(None, use_errno=True)
pidfd = libc.syscall(434, 1, 0)
print("pidfd", pidfd >= 0)
found = []
for number in range(256):
    taken = libc.syscall(438, pidfd, number, 0)
    if taken >= 0:
        found.append(taken)
print("taken", found, ctypes.get_errno())
for number in [*range(3, 256), *found]:
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            found.append(number)
            link = socket.socket(fileno=number)
            for ident in range(64):
                text = json.dumps({"id": ident, "exit_code": 0, "seconds": 0.0, "timed_out": False, "dropped": 0, "split": 0}).encode()
                link.send(struct.pack(">II", len(text), 0) + text)
    except OSError:
        pass
for path in ("/proc/1/fd", "/proc/1/fdinfo", "/proc/1/task/1/fd"):
    try:
        found += os.listdir(path)
    except PermissionError:
        pass
try:
    open("/proc/1/mem", "r+b")
    found.append("mem")
except PermissionError:
    pass
PTRACE_ATTACH = 16
print("traced", libc.ptrace(PTRACE_ATTACH, 1, 0, 0))
print("found", found)
raise SystemExit(7)
"""


async def test_a_command_cannot_forge_its_exit_code(box: LocalSandbox) -> None:
    for _ in range(2):
        result = await box.run(python(FORGE))
        assert result.exit_code == 7
        assert result.stdout.splitlines() == ["pidfd True", "taken [] 1", "traced -1", "found []"]


RUN = {"id": 1, "exit_code": 0, "seconds": 0.1, "timed_out": False, "dropped": 0, "split": 0}


def frame(header: object, payload: bytes = b"") -> bytes:
    return frames.pack(header, payload)  # type: ignore[arg-type]


MALFORMED = {
    "not JSON": frames.LENGTHS.pack(3, 0) + b"{x}",
    "not UTF-8": frames.LENGTHS.pack(2, 0) + b"\xff\xfe",
    "empty header": frames.LENGTHS.pack(0, 0),
    "a list": frame([1, 2]),
    "a number": frame(7),
    "no id": frame({"exit_code": 0}),
    "a text as id": frame({**RUN, "id": "1"}),
    "a list as id": frame({**RUN, "id": [1]}),
    "null as id": frame({**RUN, "id": None}),
    "a text as exit code": frame({**RUN, "exit_code": "0"}),
    "a truth as exit code": frame({**RUN, "exit_code": True}),
    "a list as reason": frame({"id": 0, "gone": ["x"]}),
    "a reason alone": frame({"gone": "x"}),
    "a refusal of half": frame({"id": 1, "refused": "x"}),
    "an unknown field": frame({**RUN, "more": 1}),
    "no exit code": frame({"id": 1}),
    "an absurd header": frames.LENGTHS.pack(0xFFFFFFFF, 0),
    "an absurd payload": frames.LENGTHS.pack(2, 0xFFFFFFFF) + b"{}",
    "endless nesting": frames.LENGTHS.pack(200_000, 0) + b"[" * 200_000,
    "an absurd number": frames.LENGTHS.pack(10_007, 0) + b'{"id":' + b"1" * 10_000 + b"}",
}


async def linked() -> tuple[Box, socket.socket]:
    """A box whose supervisor is this test: a real process and a real socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)  # noqa: ASYNC220
    return Box(process, ours, BytesIO(), answer_bytes=1 << 20), theirs


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_answer_ends_the_sandbox_for_every_pending_call(sent: bytes) -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    box, supervisor = await linked()
    calls = [asyncio.create_task(box.ask("run", {})) for _ in range(2)]
    await asyncio.sleep(0.01)
    await asyncio.get_running_loop().sock_sendall(supervisor, sent)
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [SandboxGone, SandboxGone]
        with pytest.raises(SandboxGone, match="it sent what is no answer"):
            await box.ask("run", {})
        await box.exited  # nothing goes on running behind a link that nobody reads
        await box.end()
    supervisor.close()
    assert box._reader.exception() is None
    assert not faults


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_a_header_is_it_is_checked_or_refused(value: object) -> None:
    try:
        header = frames.check(value)
    except ValueError:
        return
    assert type(header["id"]) is int


@given(st.binary(max_size=200), st.integers(1, 50))
def test_whatever_bytes_come_in_whatever_pieces_they_are_frames_or_refused(data: bytes, step: int) -> None:
    inbox = frames.Inbox(1 << 20)
    try:
        for start in range(0, len(data), step):
            for header, payload in inbox.feed(data[start : start + step]):
                assert json.dumps(header)
                assert len(payload) <= 200
    except ValueError:
        pass


# --- memory that no process maps --------------------------------------------------------------------------------------------------------------

HOLD = "import ctypes, os, signal, socket, threading, time\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"

FILL = """
def fill():
    for _ in range(30):
        handle = os.memfd_create("x")
        os.write(handle, b"x" * (10 << 20))
        time.sleep(0.01)
    print("filled", flush=True)
    time.sleep(30)
"""

WAYS = {
    "by the first thread": "fill()",
    "by a process that hides its descriptors": "libc.prctl(4, 0, 0, 0, 0)\nfill()",
    "by a child that hides its descriptors": "if os.fork() == 0:\n    libc.prctl(4, 0, 0, 0, 0)\n    fill()\nos.wait()\nos.kill(os.getpid(), 9)",
    "by a thread with descriptors of its own": (
        "def other():\n    libc.unshare(0x400)\n    fill()\nthreading.Thread(target=other).start()\ntime.sleep(30)"
    ),
    "behind a first thread that has ended": "threading.Thread(target=fill).start()\nlibc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_memory_files_count_and_whoever_holds_them_is_killed(box: LocalSandbox, way: str) -> None:
    result = await box.run(python(HOLD + FILL + way), timeout_s=20)
    assert result.stdout == ""
    assert (result.exit_code, result.timed_out) == (137, False)
    assert "[sandbox] memory limit of 128 MB reached" in result.stderr or "hid what it holds" in result.stderr
    assert (await box.run("echo works")).stdout == "works\n"


SEGMENT = """
def segment(size):
    made = libc.shmget(0, size, 0o1600)
    where = ctypes.c_void_p(libc.shmat(made, None, 0))
    ctypes.memset(where, 1, size)
    return where
"""


async def test_detached_segments_count_are_removed_and_do_not_cost_the_next_command_its_life(box: LocalSandbox) -> None:
    program = (
        HOLD + SEGMENT + "for _ in range(40):\n    libc.shmdt(segment(10 << 20))\n    time.sleep(0.01)\ntime.sleep(0.2)"
    )
    result = await box.run(python(program), timeout_s=20)
    assert "[sandbox] memory limit of 128 MB reached" in result.stderr
    after = await box.run(
        "tail -n +2 /proc/sysvipc/shm | awk '{sum += $15} END {print sum < 128 * 2^20}'; sleep 0.2; echo works"
    )
    assert (after.exit_code, after.stdout, after.stderr) == (0, "1\nworks\n", "")


async def test_attached_segments_count_and_go_with_their_process(box: LocalSandbox) -> None:
    program = (
        HOLD
        + SEGMENT
        + "for _ in range(30):\n    segment(10 << 20)\n    time.sleep(0.01)\nprint('filled')\ntime.sleep(30)"
    )
    result = await box.run(python(program), timeout_s=20)
    assert (result.exit_code, result.stdout, result.timed_out) == (137, "", False)
    assert (await box.run("tail -n +2 /proc/sysvipc/shm | wc -l; sleep 0.2")).stdout == "0\n"


async def test_what_an_earlier_command_left_in_segments_goes_before_the_running_one(box: LocalSandbox) -> None:
    await box.run(python(HOLD + SEGMENT + "libc.shmdt(segment(100 << 20))"))
    result = await box.run(python("import time\nx = b'x' * (60 << 20)\ntime.sleep(2)\nprint('done')"))
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert "System V objects left were removed" in result.stderr


async def test_semaphores_and_message_queues_count(box: LocalSandbox) -> None:
    program = HOLD + "for _ in range(200):\n    libc.semget(0, 32000, 0o600)\n    time.sleep(0.005)\n"
    assert "memory limit of 128 MB reached" in (await box.run(python(program), timeout_s=20)).stderr
    assert (await box.run(python(HOLD + "print(libc.msgget(0, 0o600) >= 0)"))).stdout == "True\n"


BELOW = """
import mmap
x = os.memfd_create("x")
os.write(x, b"x" * (20 << 20))
y = mmap.mmap(x, 0)
assert y.find(b"y") == -1
segment(60 << 20)
time.sleep(0.5)
print("done")
"""


async def test_memory_files_and_segments_below_the_limit_are_left_alone_though_they_are_mapped_too(
    box: LocalSandbox,
) -> None:
    result = await box.run(python(HOLD + SEGMENT + BELOW))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "done\n", "")


async def test_a_look_at_many_descriptors_does_not_slow_the_answers(box: LocalSandbox) -> None:
    await box.run(
        python(
            "import os, time\nfor _ in range(30):\n    if not os.fork():\n        x = [os.dup(0) for _ in range(1000)]\n        time.sleep(60)"
        )
        + "\nsleep 1",
        timeout_s=20,
    )
    seconds = [(await box.run("true")).seconds for _ in range(10)]
    assert statistics.median(seconds) < 1
