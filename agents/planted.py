"""What an agent may not bring into grading: a filter over the archive of its workspace. Pure, and the same for every backend.

Everything outside the workspace is left behind by the fresh sandbox already (a patched interpreter, a daemon, a shell profile). Inside it remain the
protected paths, the verifier's own paths, files that programs load by themselves, and links that lead to any of these.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from dataclasses import dataclass
from posixpath import dirname, join, normpath
from typing import Final

from agents.gitconfig import harmless
from agents.paths import upward, within
from agents.task import Task
from sandboxes.base import WORKSPACE

LOADED: Final = frozenset({"sitecustomize", "usercustomize", "conftest"})
"""Loaded by Python and pytest without being asked: as a file, package, bytecode or extension, in any folder. Kept where the task brings it."""

CONFIGURES: Final = frozenset(
    {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "setup.cfg", "tox.ini", "pyproject.toml"}
)
"""Options of the test runner. Kept where the task brings the file or asks for it."""

SHADOWED: Final = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "hypothesis"}
"""Modules that checks import. One of that name beside the checks would run in its place. Kept where the task brings it or asks for it."""

REWARD_FILES: Final = frozenset({"reward.txt", "reward.json"})
"""Where other graders look for a verdict. Ours is the verifier's exit code alone; a planted one goes all the same."""

FOLDERS: Final = frozenset({"__pycache__", ".pytest_cache"})
"""Compiled code would be run in place of the verifier's own source."""


def without_planted(task: Task, archive: bytes) -> bytes:
    """The archive without what would interfere with grading; what is dropped is restored from the task, or not needed."""
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        members = source.getmembers()
        rules = _Rules.of(task, members)
        for member in members:
            if rules.drop(member):
                continue
            content = source.extractfile(member) if member.isreg() else None
            if content is not None and rules.is_git_config(normpath(member.name)):
                text = harmless(content.read())
                member.size, content = len(text), io.BytesIO(text)
            if member.isdir() and rules.holds_ours(normpath(member.name)):
                member.mode |= 0o700  # or the agent could keep us from writing our own files
            target.addfile(member, content)
    return out.getvalue()


def restored(task: Task) -> dict[str, str]:
    """The protected files as the task brought them."""
    ours = [normpath(path) for path in task.protected]
    return {path: text for path, text in task.files.items() if any(within(normpath(path), kept) for kept in ours)}


@dataclass(frozen=True, slots=True)
class _Rules:
    ours: frozenset[str]
    """Protected paths and the verifier's own."""
    brought: frozenset[str]
    """The task's files and every folder above them."""
    asked: str
    """Text in which the task names what it wants."""
    git: frozenset[str]
    """Folders that git takes for a repository."""
    checks: frozenset[str]
    """Folders from which checks may import."""

    @classmethod
    def of(cls, task: Task, members: list[tarfile.TarInfo]) -> _Rules:
        ours = frozenset(normpath(path) for path in (*task.protected, *task.verifier.files))
        names = {normpath(member.name) for member in members}
        return cls(
            ours=ours,
            brought=frozenset(above for path in task.files for above in upward(normpath(path))),
            asked=f"{task.prompt}\n{task.verifier.command}",
            git=frozenset(
                dirname(name) for name in names if join(dirname(name), "refs") in names and _last(name) == "objects"
            ),
            checks=frozenset({"", *(dirname(path) for path in ours)}),
        )

    def drop(self, member: tarfile.TarInfo) -> bool:
        name = normpath(member.name)
        parts = name.split("/")
        if not (member.isreg() or member.isdir() or member.issym()):
            return True  # a hard link, a device: no export of ours holds one
        if FOLDERS & set(parts) or any(within(name, path) for path in self.ours):
            return True
        if not member.isdir() and self.holds_ours(name):
            return True  # a file or link in place of one of our folders
        if any(_stem(path) in LOADED and path not in self.brought for path in upward(name)):
            return True
        if name not in self.brought and (
            parts[-1] in REWARD_FILES or self._git_runs(member, name) or self._unasked(member, name)
        ):
            return True
        return member.issym() and _leads_to(name, member.linkname, self.ours)

    def holds_ours(self, name: str) -> bool:
        return any(within(path, name) for path in self.ours)

    def is_git_config(self, name: str) -> bool:
        return _last(name) == "config" and dirname(name) in self.git

    def _git_runs(self, member: tarfile.TarInfo, name: str) -> bool:
        hooks = any(_last(path) == "hooks" and dirname(path) in self.git for path in upward(name))
        return hooks or (self.is_git_config(name) and not member.isreg())

    def _unasked(self, member: tarfile.TarInfo, name: str) -> bool:
        """A configuration or a module in another's place that the task does not name."""
        if _last(name) in CONFIGURES:
            return not self._names(name)
        module, folder = (dirname(name), dirname(dirname(name))) if _stem(name) == "__init__" else (name, dirname(name))
        if folder not in self.checks or _stem(module) not in SHADOWED or module in self.brought:
            return False
        if module == name and re.search(r"\.(py|pyc|so)$", name):
            return not self._names(name)
        if module == name and not member.issym():
            return False  # data, or a folder: without its `__init__` it shadows nothing
        return not self._names(f"{module}/")

    def _names(self, path: str) -> bool:
        end = "" if path.endswith("/") else r"(?![\w-]|\.\w)"
        return (
            re.search(rf"(?:^|[^\w./-]|(?<![\w.])\./|/workspace/){re.escape(path)}{end}", self.asked, re.MULTILINE)
            is not None
        )


def _leads_to(name: str, link: str, ours: frozenset[str]) -> bool:
    """Whether a link points to one of our paths, into it, or to a folder above it. Other processes' views (/proc) are never followed.

    A `..` after a name means whatever that name's own link says, so such links go; without them the last link of any chain is plain to read.
    """
    steps = [step for step in link.split("/") if step not in ("", ".")]
    if ".." in steps[next((place for place, step in enumerate(steps) if step != ".."), len(steps)) :]:
        return True
    target = normpath(join(WORKSPACE, dirname(name), link))
    if target.startswith(("/proc", "/dev", "//")):
        return True
    return any(within(target, full) or within(full, target) for full in (join(WORKSPACE, path) for path in ours))


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    """`sitecustomize` of `a/sitecustomize.cpython-311.so`."""
    return _last(path).partition(".")[0]
