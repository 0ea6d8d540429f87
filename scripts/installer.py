"""What set-up installs and how: the two environments, their locks, and an installer that is uv where it can be and pip where not.

Standard library only: this runs on a bare Python, before anything is there.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
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
    return {**{name: setting for name, setting in words.items() if setting}, **os.environ}


CHATTER = re.compile(r" [+~-] |WARNING: Location|Using Python|Uninstalled|Resolved|WARNING: Retrying")
"""Lines of an installer that tell a person nothing, such as one for each package."""


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
        close_fds=False,  # an installer that outlives a killed set-up goes on holding its lock
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            tail.append(line)
            if not CHATTER.match(line):
                print(f"    {line}", end="", flush=True)
    return child.returncode, "".join(tail)


UNREACHABLE = re.compile(
    r"Temporary failure in name resolution|Temporary failure resolving|dns error|failed to lookup|Name or service not known|"
    r"Network is unreachable|Connection refused|[Cc]onnect error|tcp connect|timed out|ProxyError|error sending request|"
    r"Failed to fetch|Failed to establish a new connection|Could not connect|SSLError|CERTIFICATE_VERIFY_FAILED"
)
FULL = re.compile(r"No space left on device|Disk quota exceeded")


def fail(what: str, host: str, tail: str) -> NoReturn:
    """One sentence for a failed installer: the disk, the network, or what it said last."""
    last = next((" ".join(line.split()) for line in reversed(tail.splitlines()) if line.strip()), "it said nothing")
    again = "What was fetched is kept; run the same command again."
    if FULL.search(tail):
        refuse(f"{what}: the disk is full. Make room, then run the same command again.", 1)
    if reasons := UNREACHABLE.findall(tail):
        refuse(
            f"{what}: {host} cannot be reached from here ({reasons[-1]}). Check the network, the proxy and PIP_INDEX_URL. {again}",
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
            wanted = self.write(self.control, tool("uv"))
            code, tail = self.pip(self.control, ["--require-hashes", "-r", str(wanted)])
            if code and UNREACHABLE.search(tail):
                fail("bringing the installer uv", "the package index", tail)
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
