"""A small E2B-compatible cloud for tests: control plane and envd over HTTP, spoken to by the real SDK.

A machine is a folder; each of its commands runs in a bubblewrap of its own over that folder. It proves our adapter and the SDK, not E2B's cloud.
The RPC stubs are private to the SDK's wheel, whose version is pinned.
"""

import asyncio
import os
import shutil
import subprocess
import threading
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from e2b.envd.filesystem import filesystem_pb
from e2b.envd.filesystem.filesystem_connect import Filesystem, FilesystemASGIApplication
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TREES = ("workspace", "opt", "tmp", "home")


class Cloud:
    """Machines by id. `broken` makes every creation fail with that HTTP status."""

    def __init__(self, root: Path) -> None:
        self.root, self.machines, self.killed, self.broken = root, dict[str, dict[str, Any]](), list[str](), 0

    def folder(self, headers: Any) -> Path:
        return Path(self.machines[headers["e2b-sandbox-id"]]["folder"])

    def file(self, request: Request) -> Path:
        return self.folder(request.headers) / request.query_params["path"].lstrip("/")

    async def create(self, request: Request) -> Response:
        if request.headers["x-api-key"] != "e2b_" + "0" * 40:
            return JSONResponse({"code": 401, "message": "wrong key"}, 401)
        if self.broken:
            return JSONResponse({"code": self.broken, "message": "no room"}, self.broken)
        body = await request.json()
        name = f"machine{len(self.machines) + len(self.killed)}"
        for tree in TREES:
            (self.root / name / tree).mkdir(parents=True)
        self.machines[name] = {"folder": self.root / name, "metadata": body.get("metadata", {}), "body": body}
        return JSONResponse(
            {"templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.6.2", "envdAccessToken": "t"},
            201,
        )

    async def list(self, request: Request) -> Response:
        wanted = {
            urllib.parse.unquote(k): urllib.parse.unquote(v)
            for k, v in urllib.parse.parse_qsl(request.query_params.get("metadata", ""))
        }
        stamp = "2026-01-01T00:00:00Z"
        fixed = {
            "templateID": "base",
            "clientID": "c",
            "startedAt": stamp,
            "endAt": stamp,
            "cpuCount": 1,
            "memoryMB": 1,
            "diskSizeMB": 1,
        }
        fixed |= {"state": "running", "envdVersion": "0.6.2"}
        found = [
            {**fixed, "sandboxID": n, "metadata": m["metadata"]}
            for n, m in self.machines.items()
            if wanted.items() <= m["metadata"].items()
        ]
        return JSONResponse(found)

    async def delete(self, request: Request) -> Response:
        machine = self.machines.pop(request.path_params["name"], None)
        if machine is None:
            return JSONResponse({"code": 404, "message": "not found"}, 404)
        self.killed.append(request.path_params["name"])
        shutil.rmtree(machine["folder"])
        return Response(status_code=204)

    async def upload(self, request: Request) -> Response:
        path = self.file(request)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(await request.body())
        return JSONResponse([{"name": path.name, "type": "file", "path": request.query_params["path"]}])

    async def download(self, request: Request) -> Response:
        return Response(self.file(request).read_bytes(), media_type="application/octet-stream")


class Processes(Process):
    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    async def start(self, request: process_pb.StartRequest, ctx: Any, /) -> AsyncIterator[process_pb.StartResponse]:
        folder = self.cloud.folder(ctx.request_headers)
        process = request.process
        assert process is not None
        line = [
            "bwrap",
            "--die-with-parent",
            "--unshare-pid",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--ro-bind",
            "/usr",
            "/usr",
            "--symlink",
            "usr/bin",
            "/bin",
        ]
        line += [
            "--symlink",
            "usr/lib",
            "/lib",
            "--symlink",
            "usr/lib64",
            "/lib64",
            "--symlink",
            "usr/sbin",
            "/sbin",
            "--clearenv",
        ]
        line += ["--setenv", "PATH", "/usr/bin:/bin"]
        passwd = folder / "passwd"
        passwd.write_text(f"user:x:{os.getuid()}:{os.getgid()}::/home:/bin/bash\n")
        line += ["--ro-bind", str(passwd), "/etc/passwd"]
        for tree in TREES:
            line += ["--bind", str(folder / tree), f"/{tree}"]
        command = [*line, "--", process.cmd, *process.args]
        child = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        event = process_pb.ProcessEvent
        yield process_pb.StartResponse(event=event(event=Oneof("start", event.StartEvent(pid=child.pid))))
        out, err = await child.communicate()
        for kind, data in (("stdout", out), ("stderr", err)):
            if data:
                yield process_pb.StartResponse(
                    event=event(event=Oneof("data", event.DataEvent(output=Oneof(kind, data))))
                )
        end = event.EndEvent(exit_code=child.returncode or 0, exited=True, status="exited")
        yield process_pb.StartResponse(event=event(event=Oneof("end", end)))


class Files(Filesystem):
    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    async def remove(self, request: filesystem_pb.RemoveRequest, ctx: Any, /) -> filesystem_pb.RemoveResponse:
        (self.cloud.folder(ctx.request_headers) / request.path.lstrip("/")).unlink()
        return filesystem_pb.RemoveResponse()


@contextmanager
def cloud_at(root: Path) -> Iterator[tuple[Cloud, str]]:
    """A running cloud and its URL."""
    cloud = Cloud(root)
    processes, files = ProcessASGIApplication(Processes(cloud)), FilesystemASGIApplication(Files(cloud))
    rpc = {"/process.Process": processes, "/filesystem.Filesystem": files}

    async def dispatch(scope: Any, receive: Any, send: Any) -> None:
        service = next((app for prefix, app in rpc.items() if scope.get("path", "").startswith(prefix)), None)
        await (service or plain)(scope, receive, send)

    plain = Starlette(
        routes=[
            Route("/v2/sandboxes", cloud.create, methods=["POST"]),
            Route("/v2/sandboxes", cloud.list, methods=["GET"]),
            Route("/sandboxes/{name}", cloud.delete, methods=["DELETE"]),
            Route("/files", cloud.upload, methods=["POST"]),
            Route("/files", cloud.download, methods=["GET"]),
            Route("/health", lambda _: Response(status_code=204)),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(dispatch, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the test cloud did not start")
        thread.join(0.02)
    try:
        yield cloud, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
