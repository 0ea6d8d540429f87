"""Atomic files and digests: nothing half-written is ever read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.errors import UserError, WorkFailed


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `path` by a temporary name in the same folder, fsync and rename. Raises `WorkFailed` in one sentence (disk full, read-only)."""
    raw = data.encode() if isinstance(data, str) else data
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise WorkFailed(
            f"{path}: cannot be written ({error.strerror or error}); what was there before is unchanged."
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented, key-sorted JSON."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """`write_atomic` of one JSON object a line."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_lines(path: Path, rows: Iterable[Any]) -> None:
    """Append one JSON object a line, all in one write, so that a crash cuts at most the last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "replace")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, raw)
    finally:
        os.close(handle)


def read_jsonl(path: Path) -> list[Any]:
    """Rows of a JSONL file. Raises `UserError` naming the first bad line."""
    try:
        lines = path.read_text(encoding="utf-8").split(
            "\n"
        )  # not splitlines: U+0085 and U+2028 may stand inside a JSON string
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 JSONL ({error}).") from None
    rows: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: not JSON ({getattr(error, 'msg', 'nested too deeply')}); the file is cut or damaged there."
            ) from None
    return rows


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 (hex) of one file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold an advisory lock on `path`, or raise `UserError` naming who holds it. The kernel drops it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{what} is in use by {holder}; wait for it to end, or stop it.") from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
