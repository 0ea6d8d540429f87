"""Files inside a sandbox, touched from inside it: what the supervisor does for the file calls. Standard library only.

Nothing here follows a name out of the sandbox, because it runs in there. What is left to fear is a name that blocks (FIFO, device), that never
ends (sparse or huge file), or that reaches the supervisor itself (`/proc/self/mem`): all are refused by what was opened, not by how it is spelt.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator

MAX_ENTRIES = 50_000
"""Most names in one workspace archive."""

CLOSED = ("/proc", "/dev", "/sys")
"""Trees of the kernel, where a 'regular file' is a door to something else."""

FILE, LINK, FOLDER = (tarfile.REGTYPE, tarfile.AREGTYPE), (tarfile.SYMTYPE,), (tarfile.DIRTYPE,)


class Refused(Exception):
    """The request is wrong; the message is for whoever asked. `missing` when the file is simply not there."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


def refusal(path: str, error: Exception) -> Refused:
    """The sentence for an operating-system error on `path`."""
    if isinstance(error, FileNotFoundError):
        return Refused(f"{path!r}: no such file", missing=True)
    if isinstance(error, OSError):
        return Refused(f"{path!r}: {error.strerror or error}")
    return Refused(f"{path!r}: not a valid path ({error})")


def _kind(mode: int) -> str:
    names = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
    )
    return next((name for test, name in names if test(mode)), "not a regular file")


def _outside_kernel(path: str, real: str) -> None:
    if any(real == tree or real.startswith(tree + "/") for tree in CLOSED):
        raise Refused(f"{path!r}: it leads into {real.split('/')[1]!r}, which holds no files of yours")


def read(path: str, max_bytes: int) -> bytes:
    """The bytes of a regular file of at most `max_bytes`. Raises `Refused`."""
    try:
        handle = os.open(
            path, os.O_PATH | os.O_CLOEXEC
        )  # opens without any effect, so a FIFO or a device can be recognised first
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{path!r}: it is {_kind(status.st_mode)}, not a regular file")
            _outside_kernel(path, os.readlink(f"/proc/self/fd/{handle}"))
            if status.st_size > max_bytes:
                raise Refused(
                    f"{path!r}: {status.st_size} bytes, more than the {max_bytes} that one call reads; read a part of it by a command"
                )
            with open(f"/proc/self/fd/{handle}", "rb") as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise refusal(path, error) from None
    if len(data) > max_bytes:
        raise Refused(f"{path!r}: it grew past the {max_bytes} bytes that one call reads")
    return data


def write(path: str, data: bytes) -> None:
    """Write a regular file atomically, making its parents and keeping an existing file's mode. Raises `Refused`."""
    temporary = None
    try:
        if path.endswith("/"):
            raise Refused(f"{path!r}: a file's name cannot end in '/'")
        real = os.path.realpath(path)
        _outside_kernel(path, real)
        mode = 0o644
        try:
            status = os.lstat(real)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(real), exist_ok=True)
        else:
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{path!r}: it is {_kind(status.st_mode)}, not a regular file")
            mode = stat.S_IMODE(status.st_mode)
        name = os.path.join(os.path.dirname(real), ".write-" + os.urandom(8).hex())
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        temporary = name
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
        os.rename(name, real)
        temporary = None
    except (OSError, ValueError) as error:
        raise refusal(path, error) from None
    finally:
        if temporary is not None:
            os.unlink(temporary)


def pack(root: str, max_bytes: int) -> bytes:
    """The tree below `root` as an uncompressed tar: directories, regular files and symlinks, sorted, without owners. Raises `Refused`."""
    opened: list[tuple[str, int]] = []
    buffer = io.BytesIO()
    try:
        with tarfile.open(
            fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            for info, content in _walk(root, max_bytes, opened):
                archive.addfile(info, content)
    finally:
        for path, mode in reversed(opened):
            os.chmod(path, mode)
    return buffer.getvalue()


def _walk(
    root: str, max_bytes: int, opened: list[tuple[str, int]]
) -> Iterator[tuple[tarfile.TarInfo, io.BytesIO | None]]:
    """Entries of the archive. What the agent closed to its owner is opened, and noted in `opened`: `chmod 000` must not stop a grading."""

    def readable(path: str, mode: int, wanted: int) -> None:
        if mode & wanted != wanted:
            os.chmod(path, mode | wanted)
            opened.append((path, mode))

    total, entries = 0, 0
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            here = os.path.join(root, folder)
            readable(here, stat.S_IMODE(os.lstat(here).st_mode), 0o700)
            names = sorted(os.listdir(here))
        except OSError as error:
            raise refusal(folder, error) from None
        for name in names:
            relative = os.path.join(folder, name)
            full = os.path.join(root, relative)
            info, content = tarfile.TarInfo(relative), None
            try:
                status = os.lstat(full)
                info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
                if stat.S_ISDIR(status.st_mode):
                    info.type = tarfile.DIRTYPE
                    stack.append(relative)
                elif stat.S_ISLNK(status.st_mode):
                    info.type, info.linkname = tarfile.SYMTYPE, os.readlink(full)
                elif stat.S_ISREG(status.st_mode):
                    total += status.st_size
                    if total <= max_bytes:
                        readable(full, info.mode, 0o400)
                        data = read(full, max_bytes)
                        total += len(data) - status.st_size
                        info.size, content = len(data), io.BytesIO(data)
                else:
                    continue  # FIFO, socket, device: nothing of it can be carried
            except FileNotFoundError:
                continue  # a process that is still running took it away
            except OSError as error:
                raise refusal(relative, error) from None
            except Refused as error:
                if error.missing:
                    continue
                raise
            entries += 1
            if total > max_bytes:
                raise Refused(f"the workspace holds more than {max_bytes} bytes in files; remove what is not needed")
            if entries > MAX_ENTRIES:
                raise Refused(f"the workspace holds more than {MAX_ENTRIES} names; remove what is not needed")
            yield info, content


def members(data: bytes, max_bytes: int) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Every entry of an archive with its content, checked before anything is written. Raises `Refused` naming the first bad entry."""
    kinds: dict[str, bytes] = {}
    found: list[tuple[tarfile.TarInfo, bytes]] = []
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            for info in archive:
                parts = [part for part in info.name.split("/") if part not in ("", ".")]
                if info.name.startswith("/") or ".." in parts or "\0" in info.name:
                    raise Refused(f"archive entry {info.name!r} would leave the workspace")
                if info.type not in FILE + LINK + FOLDER or info.issparse():
                    raise Refused(f"archive entry {info.name!r} is neither a directory, a regular file nor a symlink")
                if not parts:
                    continue
                info.name = "/".join(parts)
                total += info.size
                if total > max_bytes or len(found) >= MAX_ENTRIES:
                    raise Refused(
                        f"the archive holds more than {max_bytes} bytes in files, or more than {MAX_ENTRIES} names"
                    )
                above, unknown = info.name.rpartition("/")[0], []
                while above and above not in kinds:  # what is above a known directory is known
                    unknown.append(above)
                    above = above.rpartition("/")[0]
                if above and kinds[above] not in FOLDER:
                    raise Refused(f"archive entry {info.name!r} lies below a name that is no directory")
                if info.name in kinds and (kinds[info.name] not in FOLDER or info.type not in FOLDER):
                    raise Refused(f"archive entry {info.name!r} appears twice")
                kinds.update(dict.fromkeys(unknown, tarfile.DIRTYPE))
                kinds[info.name] = info.type
                file = archive.extractfile(info) if info.type in FILE else None
                found.append((info, file.read() if file else b""))
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise Refused(f"the archive is damaged ({error})") from None
    return found


def unpack(root: str, data: bytes, max_bytes: int) -> None:
    """Replace what is below `root` by an archive's entries; a refused archive changes nothing. Raises `Refused`."""
    entries = members(data, max_bytes)
    clear(root)
    folders: list[tuple[str, int]] = []
    for info, content in entries:
        full = os.path.join(root, info.name)
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            if info.type in FOLDER:
                os.makedirs(full, exist_ok=True)
                folders.append((full, info.mode))
            elif info.type in LINK:
                os.symlink(info.linkname, full)
            else:
                with open(full, "xb") as file:
                    file.write(content)
                    os.fchmod(file.fileno(), info.mode & 0o777)
        except (OSError, ValueError) as error:
            raise refusal(info.name, error) from None
    for full, mode in reversed(folders):  # last, so that a read-only directory can be filled first
        os.chmod(full, mode & 0o777)


def clear(root: str) -> None:
    """Remove everything below `root`, also where the agent took its own permissions away. Raises `Refused`."""
    try:
        os.chmod(root, 0o755)
        for folder, names, _ in os.walk(root):
            for name in names:
                full = os.path.join(folder, name)
                if not os.path.islink(full):
                    os.chmod(full, 0o700)
        for name in os.listdir(root):
            full = os.path.join(root, name)
            if os.path.isdir(full) and not os.path.islink(full):
                shutil.rmtree(full)
            else:
                os.unlink(full)
    except OSError as error:
        raise refusal(root, error) from None
