"""Behaviours 4, 5, 22 and 23 in the local sandbox: hostile commands and files are contained, and what follows works."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest

from sandboxes import FileRefused, SandboxError, SandboxGone, SandboxTimeout
from sandboxes import box as box_module
from sandboxes.local import LocalBackend, LocalSandbox

MB = 1 << 20


@pytest.fixture
async def box() -> AsyncIterator[LocalSandbox]:
    made = await LocalBackend(memory_mb=256, processes=64, disk_mb=32).create(run_id="contained", lifetime_s=120)
    yield made
    await made.kill()


async def works(box: LocalSandbox) -> bool:
    result = await box.run("python3 -c 'print(6 * 7)' | cat")
    return (result.exit_code, result.stdout) == (0, "42\n")


def processes_of(box: LocalSandbox) -> set[int]:
    """Host pids below a sandbox's bubblewrap."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {box._box.process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def still_there(pids: Iterable[int]) -> list[int]:
    """Those that still run; a zombie has ended and waits for whoever adopted it."""
    found = []
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [pid] * (state not in "ZX")
    return found


# --- behaviour 4: whatever never returns ends at its own deadline -----------------------------------------------------------------------------


async def test_a_command_that_never_returns_ends_at_its_deadline_with_its_partial_output(box: LocalSandbox) -> None:
    result = await box.run("echo before; sleep 1000", timeout_s=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "before\n")
    assert 0.5 <= result.seconds < 2
    assert await works(box)


async def test_a_command_that_ignores_sigterm_and_left_its_session_ends_too(box: LocalSandbox) -> None:
    result = await box.run("trap '' TERM INT HUP; setsid bash -c 'trap \"\" TERM; sleep 1000' & wait", timeout_s=0.5)
    assert result.timed_out
    assert result.seconds < 2
    await box.quiesce()
    assert (await box.run("ps -e -o comm= | grep -c sleep")).stdout == "0\n"


async def test_a_frozen_supervisor_is_a_timeout_and_the_sandbox_is_dead_then(
    box: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_module, "ANSWER_S", 0.5)
    everything = processes_of(box)
    supervisor = max(everything)
    os.kill(supervisor, signal.SIGSTOP)  # from outside: it will never answer
    with pytest.raises(SandboxTimeout, match="did not answer `run`"):
        await box.run("true", timeout_s=0.1)
    with pytest.raises(SandboxGone):
        await box.run("true")
    await asyncio.sleep(0.2)
    assert not still_there(everything)


# --- behaviour 5: a background child that holds stdout ----------------------------------------------------------------------------------------


async def test_a_background_child_holding_stdout_does_not_hold_the_call_and_dies_with_the_sandbox(
    box: LocalSandbox,
) -> None:
    result = await box.run("echo started; sleep 1000 & sleep 0.05", timeout_s=20)
    assert (result.exit_code, result.stdout) == (0, "started\n")
    assert result.seconds < 5
    assert (await box.run("ps -e -o comm= | grep -c sleep")).stdout == "1\n"
    everything = processes_of(box)
    assert len(everything) >= 3
    await box.kill()
    assert not still_there(everything)


async def test_a_server_left_in_the_background_keeps_serving_later_commands(box: LocalSandbox) -> None:
    await box.run("echo hello > index.html; python3 -m http.server 8000 &")
    fetch = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/index.html').read())\""
    for _ in range(3):
        assert (
            "hello"
            in (await box.run(f"for i in 1 2 3 4 5 6 7 8 9; do {fetch} 2>/dev/null && break; sleep 0.3; done")).stdout
        )


async def test_quiesce_kills_every_process_that_commands_left_and_keeps_the_files(box: LocalSandbox) -> None:
    await box.run(
        "setsid nohup sleep 1000 >/dev/null 2>&1 & (while :; do echo x >> grows; done) & echo kept > f; sleep 0.1"
    )
    await box.quiesce()
    size = len(await box.read_file("grows"))
    await asyncio.sleep(0.2)
    assert len(await box.read_file("grows")) == size
    left = (await box.run("ps -e -o comm= > left; sort left f")).stdout.split()
    assert left == ["bash", "kept", "ps", "python3"]


# --- behaviour 22: hostile names and files ----------------------------------------------------------------------------------------------------


async def test_file_calls_neither_leave_nor_block_on_symlink_fifo_device_socket_or_sparse_file(
    box: LocalSandbox,
) -> None:
    await box.run(
        "mkfifo fifo; ln -s /dev/zero zero; ln -s /proc/self/environ env; ln -s fifo to-fifo; ln -s loop loop; truncate -s 20M sparse; "
        "ln -s /etc/hostname host; ln -s / root; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\"; mkdir -m 000 closed"
    )
    started = time.monotonic()
    for path in (
        "fifo",
        "zero",
        "env",
        "to-fifo",
        "loop",
        "sparse",
        "sock",
        "root",
        "closed/f",
        "/dev/stdin",
        "/proc/1/mem",
        "x" * 5000,
        "../proc/1/maps",
    ):
        with pytest.raises((FileRefused, FileNotFoundError)):
            await box.read_file(path)
    for path in (
        "fifo",
        "zero",
        "to-fifo",
        "loop",
        "root",
        "sock",
        "/usr/bin/python3",
        "/proc/self/mem",
        "/dev/shm/../null",
        "/etc/passwd",
    ):
        with pytest.raises(FileRefused):
            await box.write_file(path, b"x")
    with pytest.raises(FileNotFoundError):
        await box.read_file("host")  # the host has one; the box does not
    assert time.monotonic() - started < 5


async def test_non_utf8_names_survive_an_archive_and_can_be_read(box: LocalSandbox) -> None:
    await box.run("printf data > $'caf\\xe9'; mkdir $'d\\xff'; printf x > $'d\\xff/y'; chmod 741 $'caf\\xe9'")
    archive = await box.export_workspace()
    await box.import_workspace(archive)
    assert await box.read_file("caf\udce9") == b"data"
    assert (await box.run("stat -c %a $'caf\\xe9'; cat $'d\\xff/y'")).stdout == "741\nx"


async def test_an_archive_holds_links_as_links_and_leaves_fifos_devices_and_sockets_out(box: LocalSandbox) -> None:
    await box.run(
        "mkfifo fifo; ln -s /etc/passwd out; ln -s nowhere dangling; echo run > tool; chmod 755 tool; mkdir -m 500 locked; ln tool hard"
    )
    archive = await box.export_workspace()
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        kinds = {info.name: (info.type, info.linkname, oct(info.mode)) for info in opened}
    assert kinds["out"][:2] == (tarfile.SYMTYPE, "/etc/passwd")
    assert kinds["dangling"][:2] == (tarfile.SYMTYPE, "nowhere")
    assert kinds["tool"] == (tarfile.REGTYPE, "", "0o755")
    assert kinds["hard"][0] == tarfile.REGTYPE
    assert "fifo" not in kinds
    await box.import_workspace(archive)
    await box.import_workspace(archive)  # over a directory without write permission
    assert (await box.run("readlink out; stat -c %a tool locked")).stdout == "/etc/passwd\n755\n500\n"


async def test_what_the_agent_closed_to_itself_is_still_carried_with_its_modes(box: LocalSandbox) -> None:
    await box.run("mkdir -p a/b; echo x > a/b/f; echo y > g; chmod 000 a/b/f a/b a g; chmod 100 .")
    archive = await box.export_workspace()
    await box.import_workspace(archive)
    assert (
        await box.run("stat -c '%a %n' g a; chmod 700 a a/b; stat -c '%a %n' a/b/f")
    ).stdout == "0 g\n0 a\n0 a/b/f\n"
    await box.run("chmod 000 .")
    await box.import_workspace(archive)
    assert await works(box)


async def test_a_tree_of_many_levels_is_carried_and_cleared(box: LocalSandbox) -> None:
    deep = "/".join("d" * 1900)
    await box.run(f"mkdir -p {deep}; echo x > {deep}/f")
    archive = await box.export_workspace()
    await box.import_workspace(archive)
    assert await box.read_file(f"{deep}/f") == b"x\n"


async def test_a_sparse_file_is_bounded_by_its_size_in_an_archive(box: LocalSandbox) -> None:
    await box.run("for i in 1 2 3 4 5 6 7 8 9 10; do truncate -s 10M s$i; done")
    with pytest.raises(FileRefused, match="more than"):
        await box.export_workspace()


async def test_paths_deeper_than_the_kernel_takes_are_refused_not_a_crash(box: LocalSandbox) -> None:
    await box.run(
        "python3 -c \"\nimport os\nfor i in range(60): os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('f', 'w')\""
    )
    with pytest.raises(FileRefused, match="too long"):
        await box.export_workspace()
    assert await works(box)


# --- behaviour 23: hostile commands -----------------------------------------------------------------------------------------------------------


async def test_a_fork_bomb_is_killed_and_the_next_command_works(box: LocalSandbox) -> None:
    await box.run(":(){ :|:& };:", timeout_s=5)
    assert await works(box)
    await box.run("python3 -c 'import os\nwhile 1:\n try: os.fork()\n except OSError: pass'", timeout_s=5)
    assert await works(box)
    await box.quiesce()
    assert (await box.run("ps -e | wc -l")).exit_code == 0


async def test_a_thread_bomb_is_killed_and_the_next_command_works(box: LocalSandbox) -> None:
    result = await box.run(
        "python3 -c 'import threading, time\nwhile 1:\n try: threading.Thread(target=time.sleep, args=(99,)).start()\n except RuntimeError: pass' ",
        timeout_s=5,
    )
    assert "limit of 64 processes" in result.stderr
    assert await works(box)


async def test_one_memory_hog_fails_and_many_small_ones_are_killed_together(box: LocalSandbox) -> None:
    one = await box.run("python3 -c 'x = bytearray(2_000_000_000)'")
    assert "MemoryError" in one.stderr
    used = await box.run("python3 -c \"x = b'x' * 600_000_000\"")
    assert (used.exit_code, "[sandbox] memory limit of 256 MB reached" in used.stderr) == (137, True)
    many = await box.run(
        "for i in 1 2 3 4 5 6; do python3 -c \"x = bytearray(b'x' * 90_000_000); import time; time.sleep(30)\" & done; wait",
        timeout_s=20,
    )
    assert (many.exit_code, many.timed_out) == (137, False)
    assert "[sandbox] memory limit of 256 MB reached" in many.stderr
    assert await works(box)


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_a_disk_filler_meets_a_full_disk_and_the_next_command_can_clean_up(
    box: LocalSandbox, folder: str
) -> None:
    result = await box.run(
        f"cd {folder}; for i in 1 2 3 4; do head -c 30M /dev/zero > f$i || break; done", timeout_s=20
    )
    assert "No space left" in result.stderr
    if folder == "/workspace":
        with pytest.raises(FileRefused, match="No space left"):
            await box.write_file("more", b"x" * MB)
    assert (await box.run(f"rm {folder}/f*; head -c 1M /dev/zero > {folder}/ok && echo fine")).stdout == "fine\n"


async def test_a_flood_of_empty_files_is_stopped(box: LocalSandbox) -> None:
    result = await box.run(
        "python3 -c 'import os\nfor i in range(10**7): os.close(os.open(str(i), os.O_CREAT))'", timeout_s=30
    )
    assert "[sandbox] limit of 100000 files reached" in result.stderr
    with pytest.raises(FileRefused, match="more than 50000 names"):
        await box.export_workspace()
    assert (await box.run("find . -type f -delete; ls | wc -l")).stdout == "0\n"


async def test_endless_output_is_cut_counted_and_killed(box: LocalSandbox) -> None:
    result = await box.run("yes", timeout_s=30, max_output=1000)
    assert len(result.stdout) == 1000
    assert result.dropped_bytes > 60 * MB
    assert (result.timed_out, result.exit_code) == (False, 137)
    assert "MB of output" in result.stderr
    assert await works(box)


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 -1",
        "kill -9 1",
        "kill -STOP 1",
        "kill -INT 1; kill -TERM 1; kill -HUP 1; kill -CHLD 1",
        "pkill -9 python3",
    ],
)
async def test_signals_to_everything_leave_the_supervisor_alive(box: LocalSandbox, command: str) -> None:
    await box.run(command)
    assert await works(box)


async def test_no_network_reaches_out(box: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"'127.0.0.1', {port}", "'1.1.1.1', 53"):
            result = await box.run(f'python3 -c "import socket; socket.create_connection(({address}), 2)"')
            assert "refused" in result.stderr or "unreachable" in result.stderr, result
    assert (await box.run("ls /sys/class/net; cat /proc/net/dev | grep -c :")).stdout.split()[-1] == "1"


async def test_the_hosts_home_environment_processes_and_temporary_files_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "private").write_text("secret-in-a-file")
    monkeypatch.setenv("LLM_API_KEY", "secret-in-environment")
    box = await LocalBackend().create(run_id="private", lifetime_s=60)
    try:
        look = f"env; cat /proc/*/environ /proc/1/cmdline {tmp_path}/private /etc/shadow /etc/hostname; ls -a / /home /root ~ /tmp /run /var; ls /proc; id"
        seen = await box.run(look)
        everything = seen.stdout + seen.stderr
        assert "secret-in" not in everything
        assert str(Path.home() / ".") + ":" not in seen.stdout
        assert "uid=1000(agent)" in everything
        assert (await box.run("hostname")).stdout == "sandbox\n"
        assert {line for line in seen.stdout.split() if line.isdigit()} <= {str(n) for n in range(40)}
        for forbidden in (
            "unshare -U true",
            "mount -t tmpfs x /tmp",
            "chroot / true",
            "touch /usr/x /etc/x /x /dev/x",
            "cat /proc/1/mem",
        ):
            assert (await box.run(forbidden)).exit_code != 0, forbidden
    finally:
        await box.kill()


async def test_memory_files_sizes_and_network_are_what_the_backend_was_told() -> None:
    box = await LocalBackend(network=True, disk_mb=7).create(run_id="told", lifetime_s=60)
    try:
        assert (await box.run("df -k --output=size /workspace | tail -1")).stdout.strip() == str(7 * 1024)
        with socket.create_server(("127.0.0.1", 0)) as server:
            reach = await box.run(
                f"python3 -c \"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)\""
            )
        assert reach.exit_code == 0
    finally:
        await box.kill()


# --- behaviour 3: nothing survives us ---------------------------------------------------------------------------------------------------------


def running(marker: str) -> list[int]:
    """Host processes whose command line ends in `sleep <marker>`."""
    done = subprocess.run(["pgrep", "-x", "-f", f"sleep {marker}"], stdout=subprocess.PIPE, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


CRASH = """
import asyncio, os, sys
from pathlib import Path
from sandboxes.local import LocalBackend
async def main():
    backend = LocalBackend(root=Path(sys.argv[1]))
    boxes = [await backend.create(run_id="crashed", lifetime_s=600) for _ in range(3)]
    for box in boxes:
        await box.run("sleep MARKER & setsid sleep MARKER &")
    print(*[box._box.process.pid for box in boxes], flush=True)
    if sys.argv[2] == "exit":
        sys.stdin.readline()
        return
    await boxes[0].run("sleep MARKER", timeout_s=600)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "exit"])
def test_sandboxes_die_with_their_process_however_it_dies_and_sweep_clears_the_records(
    tmp_path: Path, how: str
) -> None:
    marker = f"98765{os.getpid()}"
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH.replace("MARKER", marker), str(tmp_path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    assert len(pids) == 3
    assert len(running(marker)) >= 6
    if how != "exit":
        child.send_signal(getattr(signal, how))
    child.stdin.close()
    child.wait(timeout=20)
    child.stdout.close()
    deadline = time.monotonic() + 5
    while (left := running(marker) + still_there(pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    asyncio.run(LocalBackend(root=tmp_path).sweep("crashed"))
    assert not os.listdir(tmp_path)


async def test_cancelling_a_call_or_a_creation_leaves_nothing(tmp_path: Path) -> None:
    backend = LocalBackend(root=tmp_path)
    for delay in (0.0, 0.001, 0.01, 0.03, 0.06):
        task = asyncio.create_task(backend.create(run_id="cancelled", lifetime_s=60))
        await asyncio.sleep(delay)
        task.cancel()
        made = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(made, LocalSandbox):  # a fast machine had made it by then
            assert delay
            await made.kill()
        else:
            assert isinstance(made, asyncio.CancelledError)
    box = await backend.create(run_id="cancelled", lifetime_s=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await box.run("sleep 100", timeout_s=100)
    assert (await box.run("echo still")).stdout == "still\n"
    await box.kill()
    for _ in range(100):
        if not os.listdir(tmp_path):
            break
        await asyncio.sleep(0.05)
    assert not os.listdir(tmp_path)


async def test_a_record_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(SandboxError, match="nobody else can write"):
        LocalBackend(root=tmp_path)
