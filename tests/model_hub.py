"""A small ModelScope-compatible server for tests: the two routes that the real client needs, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse


@dataclass
class Hub:
    """Files of one model; `cut` drops the connection in the middle of a file that often, `hang` stops sending there, `lie` lists a false digest."""

    files: dict[str, bytes]
    cut: dict[str, int] = field(default_factory=dict)
    hang: set[str] = field(default_factory=set)
    lie: set[str] = field(default_factory=set)
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(file, Range header) of each request for content."""

    def listing(self) -> dict[str, object]:
        entries = [
            {
                "Name": name,
                "Path": name,
                "Type": "blob",
                "Size": len(data),
                "Sha256": hashlib.sha256(b"false" if name in self.lie else data).hexdigest(),
                "Revision": "c0ffee",
                "IsLFS": False,
                "Mode": "100644",
            }
            for name, data in sorted(self.files.items())
        ]
        data = {"Files": entries, "TotalCount": len(entries), "LatestCommitter": {"Revision": "c0ffee"}}
        return {"Code": 200, "Success": True, "Message": "", "Data": data}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Silent: the test reads `hub.requests`."""

        def do_GET(self) -> None:
            url = urlparse(self.path)
            query = parse_qs(url.query)
            if url.path.endswith("/repo/files"):
                self.reply(json.dumps(hub.listing()).encode(), "application/json")
            elif url.path.endswith("/repo") and query.get("FilePath", [""])[0] in hub.files:
                self.content(query["FilePath"][0])
            else:
                self.send_error(404)

        def reply(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def content(self, name: str) -> None:
            data, wanted = hub.files[name], self.headers.get("Range") or ""
            hub.requests.append((name, wanted))
            first, last = 0, len(data) - 1
            if wanted.startswith("bytes="):
                left, _, right = wanted.removeprefix("bytes=").partition("-")
                first, last = int(left or 0), int(right) if right else last
            body = data[first : last + 1]
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(body)))
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            self.end_headers()
            if hub.cut.get(name, 0) > 0 or name in hub.hang:
                hub.cut[name] = hub.cut.get(name, 0) - 1
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                while name in hub.hang:
                    time.sleep(0.05)
                self.close_connection = True
                return
            self.wfile.write(body)

    return Handler


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.hang.clear()
        server.shutdown()
        server.server_close()
        thread.join()
