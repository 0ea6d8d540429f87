"""Paths and commands that a task brings: what is wrong with one is said when the task is loaded, not when an agent has worked on it."""

from __future__ import annotations

from collections.abc import Iterable
from posixpath import normpath
from typing import Final

from sandboxes.base import MAX_FILE_BYTES

MAX_COMMAND_BYTES: Final = 128 * 1024 - 1
"""Longest command, in bytes: what Linux passes to a program as one argument (MAX_ARG_STRLEN, with its final zero)."""

MAX_NAME_BYTES: Final = 255
"""Longest name of one file or folder, in bytes (NAME_MAX)."""


def within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or below it, as they are written."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def upward(path: str) -> list[str]:
    """The path and every folder above it, without the workspace itself: `a/b` gives `a` and `a/b`."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def clash(paths: Iterable[str]) -> str | None:
    """A path that is also a folder above another, if there is one."""
    files = set(paths)
    return next((above for path in sorted(files) for above in upward(path)[:-1] if above in files), None)


def check_path(path: str) -> str:
    """The path, or `ValueError`: it must be relative to the workspace, inside it, and written in the shortest way."""
    if not path.strip():
        raise ValueError("a path is empty")
    if "\0" in path:
        raise ValueError(f"the path {path!r} holds a zero byte")
    if path.startswith("/") or normpath(path).split("/")[0] == "..":
        raise ValueError(f"the path {path!r} leaves the workspace; paths are relative to it")
    if normpath(path) != path or path == ".":
        raise ValueError(f"the path {path!r} must be written without '.', '..', '//' and a final '/'")
    if any(len(_bytes(name, path)) > MAX_NAME_BYTES for name in path.split("/")):
        raise ValueError(f"the path {path[:40]!r}… has a name of more than {MAX_NAME_BYTES} bytes")
    return path


def check_files(files: dict[str, str]) -> dict[str, str]:
    """The files, or `ValueError` for a wrong path or a text that no sandbox would take."""
    for path, text in files.items():
        if len(_bytes(text, f"the text of {check_path(path)}")) > MAX_FILE_BYTES:
            raise ValueError(f"the text of {path!r} has more than {MAX_FILE_BYTES} bytes")
    if both := clash(files):
        raise ValueError(f"{both!r} is both a file and a folder")
    return files


def check_command(command: str) -> str:
    """The command, or `ValueError` for one that no shell can be given."""
    if "\0" in command:
        raise ValueError("the command holds a zero byte")
    if len(_bytes(command, "the command")) > MAX_COMMAND_BYTES:
        raise ValueError(
            f"the command has more than {MAX_COMMAND_BYTES} bytes; put a script among the files and run that"
        )
    return command


def _bytes(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what!r} is not valid Unicode (it holds a lone surrogate)") from None
