"""A stand-in for the train environment's `python -m swift.cli.deploy`, for tests of everything around it.

`install(folder)` makes an executable `python` there. Started as the real one it serves the OpenAI routes that ms-swift serves, and writes the
same line when it listens. Policies follow the reference solutions of a task file: the base never calls a tool, `sft` solves the tasks that
SOLVED names. Orders come by environment variables, so that a test can make it refuse, die or fail.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def install(folder: Path) -> Path:
    """The path to give as paths.train_python."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -I) exit 0;; esac\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n'
    )
    python.chmod(0o755)
    return python


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(f"--{name}") + 1]


def solutions() -> dict[str, dict[str, Any]]:
    tasks = [json.loads(line) for line in Path(os.environ["STAND_IN_TASKS"]).read_text().splitlines()]
    return {task["prompt"]: task for task in tasks}


def answer(model: str, messages: list[dict[str, Any]]) -> str:
    task = solutions().get(messages[1]["content"]) if len(messages) > 1 else None
    if task is None or model == "base" or task["family"] not in os.environ.get("STAND_IN_SOLVED", "").split(","):
        return "I am only a base model."
    done = sum(message["role"] == "tool" for message in messages)
    if done == len(task["solution"]):
        return "Done."
    return f"<tool_call>\n{json.dumps(task['solution'][done])}\n</tool_call>"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served = 0

    def do_GET(self) -> None:
        names = [flag("served_model_name"), *(item.split("=")[0] for item in adapters())]
        self.send(200, {"data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.served += 1
        if Handler.served > int(os.environ.get("STAND_IN_DIES_AFTER", "1000000")):
            print("RuntimeError: no memory left", flush=True)
            os._exit(1)
        if body["model"] == os.environ.get("STAND_IN_REFUSES"):
            return self.send(400, {"message": "adapter_config.json: rank 64 is too large", "object": "error"})
        if os.environ.get("STAND_IN_FAILS_ON", "\0") in body["messages"][-1]["content"]:
            return self.send(500, {"message": "out of luck", "object": "error"})
        time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
        text = answer(body["model"], body["messages"])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "token_ids": [1, 2],
        }
        choice["logprobs"] = {"content": [{"logprob": -0.5}, {"logprob": -0.5}]}
        return self.send(
            200, {"choices": [choice], "prompt_token_ids": [7], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        )

    def send(self, status: int, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        return None


def adapters() -> list[str]:
    start = sys.argv.index("--adapters") + 1 if "--adapters" in sys.argv else len(sys.argv)
    end = next((i for i in range(start, len(sys.argv)) if sys.argv[i].startswith("--")), len(sys.argv))
    return sys.argv[start:end]


if __name__ == "__main__":
    if os.environ.get("STAND_IN_CRASHES"):
        print("ValueError: Free memory on device is less than desired", flush=True)
        sys.exit(3)
    if os.environ.get("STAND_IN_HANGS"):
        print("loading for ever", flush=True)
        time.sleep(600)
    server = ThreadingHTTPServer(("127.0.0.1", int(flag("port"))), Handler)
    print(f"INFO:     Uvicorn running on http://127.0.0.1:{server.server_port} (Press CTRL+C to quit)", flush=True)
    server.serve_forever()
