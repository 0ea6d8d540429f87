"""What runs inside a cloud sandbox for each call, uploaded once. Standard library only, Python 3.8 or newer.

The cloud's own daemon signals only a command's leader, waits for end-of-file on its output, and decodes it lossily. So a command's output goes to
files, where no background child can hold anything up, and the file calls are those of `boxfs.py`, as in the local sandbox.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sandboxes import boxfs

FLOOD_BYTES = 64 * 1024 * 1024
"""Output of one command after which it is killed."""


def _sessions() -> dict[int, int]:
    """pid → session of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[3])
    return found


def _kill_session(leader: int) -> None:
    for pid in [leader, *(pid for pid, session in _sessions().items() if session == leader)]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command to its end or deadline; `stdout` and `stderr` come back in base64."""
    started, limit = time.monotonic(), request["max_output"]
    timed_out, note = False, ""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            shell = subprocess.Popen(
                ["/bin/bash", "-c", request["command"].encode("utf-8", "surrogateescape")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=os.path.join(request["workspace"], request["cwd"]),
                env={**os.environ, **request["env"]},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            text = base64.b64encode(f"the command could not start: {error}\n".encode("utf-8", "replace")).decode()
            return {"exit_code": 126, "stdout": "", "stderr": text, "seconds": 0.0, "timed_out": False, "dropped": 0}
        while True:
            try:
                shell.wait(0.05)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() >= started + request["timeout_s"]:
                    timed_out = True
                elif os.fstat(out.fileno()).st_size + os.fstat(err.fileno()).st_size > FLOOD_BYTES:
                    note = f"\n[sandbox] more than {FLOOD_BYTES >> 20} MB of output: the command was killed\n"
                else:
                    continue
                _kill_session(shell.pid)
        kept = [os.pread(file.fileno(), limit, 0) for file in (out, err)]
        size = os.fstat(out.fileno()).st_size + os.fstat(err.fileno()).st_size
    code = shell.returncode
    return {
        "exit_code": 124 if timed_out else 128 - code if code < 0 else code,
        "stdout": base64.b64encode(kept[0]).decode(),
        "stderr": base64.b64encode(kept[1] + note.encode()).decode(),
        "seconds": time.monotonic() - started,
        "timed_out": timed_out,
        "dropped": size - len(kept[0]) - len(kept[1]),
    }


def quiesce(request: dict[str, Any]) -> dict[str, Any]:
    """As root: kill every process of the workspace's owner until none is left."""
    owner = os.stat(request["workspace"]).st_uid
    for _ in range(100):
        left = []
        for pid in _sessions():
            with suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == owner and pid not in (1, os.getpid(), os.getppid()):
                    with open(f"/proc/{pid}/stat", "rb") as file:
                        zombie = file.read().rpartition(b")")[2].split()[0] == b"Z"
                    if not zombie:
                        left.append(pid)
                        os.kill(pid, signal.SIGKILL)
        if not left:
            return {}
        time.sleep(0.02)
    return {"left": len(left)}


def _fetch(data: bytes) -> dict[str, Any]:
    handle, path = tempfile.mkstemp(prefix="agentexecutor-")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return {"fetch": path}


def _sent(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)
    return data


def read(request: dict[str, Any]) -> dict[str, Any]:
    return _fetch(boxfs.read(os.path.join(request["workspace"], request["path"]), request["max_bytes"]))


def write(request: dict[str, Any]) -> dict[str, Any]:
    boxfs.write(os.path.join(request["workspace"], request["path"]), _sent(request["payload"]))
    return {}


def export(request: dict[str, Any]) -> dict[str, Any]:
    return _fetch(boxfs.pack(request["workspace"], request["max_bytes"]))


def unpack(request: dict[str, Any]) -> dict[str, Any]:
    boxfs.unpack(request["workspace"], _sent(request["payload"]), request["max_bytes"])
    return {}


OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "run": run,
    "quiesce": quiesce,
    "read": read,
    "write": write,
    "export": export,
    "import": unpack,
}


def main() -> None:
    """`argv[1]` is the file of the JSON request; the JSON answer goes to stdout."""
    request = json.loads(_sent(sys.argv[1]))
    try:
        answer = OPERATIONS[request["op"]](request)
    except boxfs.Refused as error:
        answer = {"refused": str(error), "missing": error.missing}
    print(json.dumps(answer))
