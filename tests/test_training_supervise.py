"""Supervision on real process trees of small scripts: BEHAVIOURS 3 and 20. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from configs.errors import UserError, WorkFailed
from configs.load import ROOT
from training.launch import Command
from training.supervise import Child, run_child, spawn_child

# A launcher like torchrun: two ranks, each in a session of its own, that ignore SIGTERM and write their pids.
TREE = """
import os, signal, subprocess, sys, time
rank = '''
import os, signal, sys, time
os.setsid()
if {stubborn}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + '/' + str(os.getpid()), 'w').close()
time.sleep(600)
'''.replace('{stubborn}', sys.argv[2])
ranks = [subprocess.Popen([sys.executable, '-S', '-c', rank, sys.argv[1]]) for _ in range(2)]
open(sys.argv[1] + '/launcher-' + str(os.getpid()), 'w').close()
print('started', flush=True)
for rank in ranks: rank.wait()
"""


def script(text: str, *args: str, env: dict[str, str] | None = None) -> Command:
    return Command([sys.executable, "-S", "-c", textwrap.dedent(text), *args], env or {})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: object, seconds: float = 10.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def ranks(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def launcher(folder: Path) -> int:
    return next(int(path.name.partition("-")[2]) for path in folder.glob("launcher-*"))


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


def started(child: Child, pids: Path) -> None:
    wait_for(lambda: child.poll() is None and len(ranks(pids)) == 2 and list(pids.glob("launcher-*")))
    child.poll()


def test_every_line_is_kept_in_the_file_and_passed_on_and_a_redrawn_bar_only_in_its_newest_state(
    tmp_path: Path,
) -> None:
    seen: list[str] = []
    out = script(
        "import sys; [sys.stdout.write(f'{i}%\\r') for i in range(500)]; print(); print('last'); sys.stdout.write('no newline')"
    )
    done = run_child(out, tmp_path / "log", on_line=seen.append)
    assert (tmp_path / "log").read_bytes().count(b"\r") == 500
    assert seen[-2:] == ["last", "no newline"]
    assert len(seen) < 10
    assert done.lines == 2


def test_a_child_that_fails_is_a_failure_with_the_tail_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match=r"(?s)train failed with exit code 3.*log.*the reason"):
        run_child(script("print('the reason'); raise SystemExit(3)"), tmp_path / "log", name="train")


def test_the_reason_in_a_ranks_traceback_is_not_pushed_out_by_torchruns_own_report(tmp_path: Path) -> None:
    report = "E1130 1499 lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0"
    text = f"print('RuntimeError: the reason'); print({report!r}); print('torchrun says little\\n' * 60); raise SystemExit(1)"
    with pytest.raises(WorkFailed, match=r"the reason$"):
        run_child(script(text), tmp_path / "log")


def test_a_child_killed_by_a_signal_says_which(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match="SIGKILL"):
        run_child(script("import os; os.kill(os.getpid(), 9)"), tmp_path / "log")


def test_zero_without_the_expected_output_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match="exit code 0, but there is no checkpoint"):
        run_child(script("print('bye')"), tmp_path / "log", expect=lambda: "there is no checkpoint")


def test_an_interpreter_that_is_missing_is_named_with_its_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="setup_env"):
        run_child(Command(["/nowhere/bin/python"]), tmp_path / "log")


def test_a_child_past_its_time_or_silent_for_too_long_is_ended(tmp_path: Path) -> None:
    for limits in ({"timeout_s": 0.5}, {"stall_s": 0.5}):
        with pytest.raises(WorkFailed, match="was ended"):
            run_child(script("import time; time.sleep(60)"), tmp_path / "log", **limits)


def test_ranks_in_their_own_sessions_that_ignore_the_request_die_within_the_grace(tmp_path: Path, pids: Path) -> None:
    with spawn_child(script(TREE, str(pids), "1"), tmp_path / "log", grace_s=0.5) as child:
        started(child, pids)
        tree = [*ranks(pids), launcher(pids), child.process.pid]
        begun = time.monotonic()
    assert time.monotonic() - begun < 4.0
    assert not [pid for pid in tree if alive(pid)]


def test_ranks_of_a_launcher_killed_with_9_do_not_survive_it(tmp_path: Path, pids: Path) -> None:
    with spawn_child(script(TREE, str(pids), "1"), tmp_path / "log", grace_s=0.5) as child:
        started(child, pids)
        os.kill(launcher(pids), signal.SIGKILL)
        wait_for(lambda: child.poll() is not None)
        assert child.poll() == 128 + signal.SIGKILL
        assert not [pid for pid in ranks(pids) if alive(pid)]


def test_nothing_survives_when_the_keeper_itself_is_killed_with_9(tmp_path: Path, pids: Path) -> None:
    with spawn_child(script(TREE, str(pids), "1"), tmp_path / "log", grace_s=0.5) as child:
        started(child, pids)
        child.process.kill()
        wait_for(lambda: child.poll() is not None)
    assert not [pid for pid in [*ranks(pids), launcher(pids)] if alive(pid)]


def test_one_rank_killed_with_9_leaves_the_verdict_to_the_launcher_and_no_process(tmp_path: Path, pids: Path) -> None:
    with spawn_child(script(TREE, str(pids), "0"), tmp_path / "log", grace_s=0.5) as child:
        started(child, pids)
        one, other = ranks(pids)
        os.kill(one, signal.SIGKILL)
        os.kill(other, signal.SIGTERM)
        wait_for(lambda: child.poll() is not None)
        assert child.poll() == 0  # this launcher does not mind; what matters is that its word is taken


SUPERVISOR = """
import sys
from pathlib import Path
from tests.test_training_supervise import TREE, script
from training.supervise import run_child
run_child(script(TREE, sys.argv[1], '1'), Path(sys.argv[2]), grace_s=0.5)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_tree_ends_with_its_supervisor(tmp_path: Path, pids: Path, number: signal.Signals) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(pids), str(tmp_path / "log")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: len(ranks(pids)) == 2, 20)
    supervisor.send_signal(number)
    supervisor.wait(10)
    wait_for(lambda: not [pid for pid in [*ranks(pids), launcher(pids)] if alive(pid)], 5)


def test_an_exception_that_is_no_exception_ends_the_tree_also_in_a_thread(tmp_path: Path, pids: Path) -> None:
    class Termination(BaseException):
        """As Prefect's TerminationSignal."""

    caught: list[BaseException] = []

    def work() -> None:
        try:
            run_child(script(TREE, str(pids), "0"), tmp_path / "log", on_line=raise_it, grace_s=2.0)
        except BaseException as error:
            caught.append(error)

    def raise_it(line: str) -> None:
        wait_for(lambda: len(ranks(pids)) == 2)
        raise Termination

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert [type(error) for error in caught] == [Termination]
    assert not [pid for pid in [*ranks(pids), launcher(pids)] if alive(pid)]


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path, pids: Path) -> None:
    # A parent-death signal would fire here: the kernel sends it when the spawning *thread* ends.
    context = spawn_child(script(TREE, str(pids), "0"), tmp_path / "log", grace_s=2.0)
    box: list[Child] = []
    thread = threading.Thread(target=lambda: box.append(context.__enter__()))
    thread.start()
    thread.join()
    started(box[0], pids)
    time.sleep(0.5)
    assert box[0].poll() is None
    context.__exit__(None, None, None)
    assert not [pid for pid in ranks(pids) if alive(pid)]


def test_an_orphan_that_a_finished_child_left_behind_is_ended_too(tmp_path: Path, pids: Path) -> None:
    leave = f"""
    import subprocess, sys
    subprocess.Popen([sys.executable, '-S', '-c', "import os,time; os.setsid(); open({str(pids)!r} + '/' + str(os.getpid()), 'w'); time.sleep(600)"])
    import os, time
    while not os.listdir({str(pids)!r}): time.sleep(.02)
    """
    run_child(script(leave), tmp_path / "log", grace_s=1.0)
    assert len(ranks(pids)) == 1
    assert not alive(ranks(pids)[0])


def test_a_server_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with spawn_child(script("print('port taken'); raise SystemExit(1)"), tmp_path / "log", name="server") as child:
        wait_for(lambda: child.poll() is not None)
        with pytest.raises(WorkFailed, match=r"(?s)server ended with exit code 1.*port taken"):
            child.check()


def test_no_secret_and_no_stale_rank_reaches_a_child_unless_it_is_named(tmp_path: Path) -> None:
    ours = {
        "PATH": os.environ["PATH"],
        "LLM_API_KEY": "sk-llm",
        "E2B_API_KEY": "e2b-1",
        "HF_TOKEN": "hf-1",
        "MY_PASSWORD": "pw",
        "RANK": "3",
    }
    show = script("import os; print(sorted(os.environ.items()))", env={"ADDED": "yes"})
    run_child(show, tmp_path / "none", environ=ours)
    text = (tmp_path / "none").read_text()
    assert "ADDED" in text
    assert not [word for word in ("sk-llm", "e2b-1", "hf-1", "pw'", "RANK") if word in text]
    run_child(Command(show.argv, show.env, secrets=("E2B_API_KEY",)), tmp_path / "one", environ=ours)
    text = (tmp_path / "one").read_text()
    assert "e2b-1" in text
    assert "sk-llm" not in text


def test_memory_of_the_whole_tree_is_measured(tmp_path: Path) -> None:
    grow = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import time; b = bytearray(80_000_000); time.sleep(1)'])"
    assert run_child(script(grow), tmp_path / "log").peak_bytes > 80_000_000


def test_memory_that_processes_share_counts_once(tmp_path: Path) -> None:
    shared = "import os, time; b = bytearray(100_000_000); [os.fork() or time.sleep(9) for _ in range(3)]; time.sleep(1.5); os._exit(0)"
    assert 100_000_000 < run_child(script(shared), tmp_path / "log").peak_bytes < 200_000_000  # resident: 400 MB


def test_output_that_floods_is_read_to_its_end(tmp_path: Path) -> None:
    seen: list[str] = []
    flood = script("import sys; [print('x' * 90, i) for i in range(100_000)]")
    assert run_child(flood, tmp_path / "log", on_line=seen.append).lines == 100_000
    assert seen[-1].endswith(" 99999")
