"""What an agent may not bring into grading: a filter over the archive of its workspace. Pure, and the same for every backend.

Everything outside the workspace is left behind by the fresh sandbox already (a patched interpreter, a daemon, a shell profile). Inside it remain the
protected paths, the verifier's own paths, files that programs load by themselves, and links that lead to any of these.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from posixpath import dirname, join, normpath
from typing import Final

from agents.task import Task
from sandboxes.base import WORKSPACE

LOADED: Final = frozenset({"sitecustomize.py", "usercustomize.py", "conftest.py", "pytest.ini", ".pytest.ini"})
"""Loaded by Python and pytest without being asked. Kept where the task itself brings that file."""

REWARD_FILES: Final = frozenset({"reward.txt", "reward.json"})
"""Where other graders look for a verdict. Ours is the verifier's exit code alone; a planted one goes all the same."""

FOLDERS: Final = frozenset({"__pycache__", ".pytest_cache"})
"""Compiled code would be run in place of the verifier's own source."""


def without_planted(task: Task, archive: bytes) -> bytes:
    """The archive without what would interfere with grading; what is dropped is restored from the task, or not needed."""
    ours = {normpath(path) for path in (*task.protected, *task.verifier.files)}
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            if _dropped(member, ours, task.files):
                continue
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    return out.getvalue()


def restored(task: Task) -> dict[str, str]:
    """The protected files as the task brought them."""
    ours = [normpath(path) for path in task.protected]
    return {path: text for path, text in task.files.items() if any(_within(normpath(path), kept) for kept in ours)}


def _dropped(member: tarfile.TarInfo, ours: Iterable[str], brought: dict[str, str]) -> bool:
    name = normpath(member.name)
    parts = name.split("/")
    if FOLDERS & set(parts) or (parts[-1] in LOADED | REWARD_FILES and name not in brought):
        return True
    if any(_within(name, path) for path in ours):
        return True
    if not member.isdir() and any(_within(path, name) for path in ours):
        return True  # a file or link in place of one of our folders
    return member.issym() and _leads_to(name, member.linkname, ours)


def _leads_to(name: str, link: str, ours: Iterable[str]) -> bool:
    """Whether a link points to one of our paths, into it, or to a folder above it. Other processes' views (/proc) are never followed."""
    target = normpath(join(WORKSPACE, dirname(name), link))
    if target.startswith(("/proc", "/dev", "//")):
        return True
    return any(_within(target, full) or _within(full, target) for full in (join(WORKSPACE, path) for path in ours))


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
