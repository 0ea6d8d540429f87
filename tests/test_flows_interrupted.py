"""`all` ended from outside while a trainer runs: nothing of it survives, and the next one goes on from what was finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import light_steps
import pytest

from configs.files import write_atomic
from configs.load import ROOT, dump_profile, load_profile
from training.keeper import descendants

pytestmark = pytest.mark.slow  # 30–60 s each: every `all` starts a Prefect server of its own

SCRIPT = """
import sys

sys.path[:0] = [{tests!r}, {root!r}]
import light_steps
from agentexecutor.console import end_on_sigterm
from configs.load import load_profile
from configs.run import new_run
from flows.local import run_all
from tasks_lib.steps import using

end_on_sigterm()
with using(light_steps.TABLE):
    results = run_all(new_run(load_profile({profile!r}, environ={{}})))
print(",".join(f"{{r.step}}={{'reused' if r.reused else 'made'}}" for r in results))
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    script = SCRIPT.format(tests=str(ROOT / "tests"), root=str(ROOT), profile=str(folder / "light.yaml"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_atomic(tmp_path / "train.jsonl", light_steps.task_line("train"))
    write_atomic(tmp_path / "heldout.jsonl", light_steps.task_line("heldout"))
    flags = {"collect.tasks": "train.jsonl", "evaluate.tasks": "heldout.jsonl"} | {
        f"paths.{n}": n for n in ("data", "models", "output", "demo")
    }
    write_atomic(
        tmp_path / "light.yaml",
        dump_profile(load_profile("smoke", flags={k: str(tmp_path / v) for k, v in flags.items()}, environ={})),
    )
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_all_ended_by_a_signal_leaves_no_process_and_the_next_one_goes_on(
    folder: Path, number: signal.Signals
) -> None:
    write_atomic(folder / "data" / "trouble" / "sft", "hang")
    trainer_file = folder / "data" / "trouble" / "sft.pid"
    whole = _start(folder)
    try:
        end = time.monotonic() + 150
        while not (trainer_file.is_file() and trainer_file.read_text()):
            assert whole.poll() is None, whole.communicate()
            assert time.monotonic() < end, "sft did not start"
            time.sleep(0.2)
        trainer = int(trainer_file.read_text())
        (events,) = folder.glob("output/*/events.jsonl")
        api = next(e["api"] for e in map(json.loads, events.read_text().splitlines()) if e["kind"] == "server")
        tree = descendants(whole.pid)
        assert trainer in tree
        assert httpx.get(f"{api}/health").is_success

        whole.send_signal(number)
        assert whole.wait(30) != 0
        end = time.monotonic() + 20
        while any(map(_alive, tree)) and time.monotonic() < end:
            time.sleep(0.1)
        assert [pid for pid in tree if _alive(pid)] == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{api}/health")
    finally:
        whole.kill()
        whole.communicate()
    if number is not signal.SIGTERM:
        return  # what is left is the same; once is enough to see that it can be gone on from
    again = _start(folder)
    out, err = again.communicate(timeout=150)
    assert again.returncode == 0, err
    assert out.strip().startswith("collect=reused,export=reused,sft=made,rl-prepare=made,grpo=made")


def test_a_second_all_on_the_same_output_is_refused_by_name_and_starts_nothing(folder: Path) -> None:
    from configs.errors import UserError
    from configs.files import exclusive
    from configs.run import Layout, new_run
    from flows.local import run_all

    profile = load_profile(folder / "light.yaml", environ={})
    with (
        exclusive(Layout(profile).lock, "this test"),
        pytest.raises(UserError, match=rf"in use by process {os.getpid()}"),
    ):
        run_all(new_run(profile))
    assert not Layout(profile).prefect.exists()


def test_a_prefect_address_where_nothing_answers_is_one_clear_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from configs.errors import UserError
    from configs.run import new_run
    from flows.local import run_all

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(UserError, match=r"PREFECT_API_URL=http://127\.0\.0\.1:9/api: no Prefect server answers there"):
        run_all(new_run(load_profile(folder / "light.yaml", environ={})))
