"""A policy server: one supervised `swift deploy` child that holds the base and every adapter by name, on this machine alone.

Why ms-swift's server: it renders prompts as training does, id for id. Other servers use the model's own chat template, which for small models
has no tools; then no tool call ever comes and nothing fails.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from configs.errors import UserError, WorkFailed
from configs.run import Run
from training.arguments import BASE_NAME, Job, deploy_command
from training.engine import with_engine
from training.launch import Command
from training.supervise import Child, spawn_child

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
"""What an adapter may be called: it becomes a model name, a folder name and a word of a report."""

READY_S: Final = 1800.0
"""Deadline of the start, in seconds: 50 to 80 s for a small model on two cores, up to a quarter of an hour for 27B with kernels to build."""

FIRST_ANSWER_S: Final = 600.0
"""Deadline of a policy's first answer, in seconds: kernels and adapters are loaded by it (20 s on two cores)."""

POLL_S: Final = 0.5
TELL_S: Final = 10.0
"""Seconds between words about a start that takes long."""
_LISTENS: Final = re.compile(r"Uvicorn running on http://127\.0\.0\.1:(\d+)")
_BROKEN: Final = ("EngineDeadError", "EngineCore encountered a fatal error")
"""vLLM's words when its engine is dead while the HTTP server still answers, with errors only."""


@dataclass
class PolicyServer:
    """A ready server. `names` are its policies: the base, then the adapters."""

    url: str
    """With its `/v1`, for agents.policy.PolicyLLM."""
    names: tuple[str, ...]
    start_s: float
    """Seconds until every policy had answered once."""
    engine: str
    """`vllm` or `transformers`."""
    _child: Child
    _lines: _Lines

    @property
    def peak_bytes(self) -> int:
        """Largest memory of the server's whole tree so far."""
        return self._child.peak_bytes

    def check(self) -> None:
        """Raises `WorkFailed` with the log's tail when the server or its engine is dead. Call it now and then: it also reads the log along."""
        self._child.check()
        if self._lines.broken:
            raise self._child.failed(f"cannot go on ({self._lines.broken})")


@dataclass
class _Lines:
    port: int = 0
    broken: str = ""

    def __call__(self, line: str) -> None:
        listens = _LISTENS.search(line)
        if listens:
            self.port = int(listens.group(1))
        if not self.broken:
            self.broken = next((word for word in _BROKEN if word in line), "")


def check_names(adapters: Mapping[str, Path]) -> None:
    """Raise `UserError` for a name that cannot be served or asked, or a path that ms-swift's `name=path` cannot hold."""
    for name, path in adapters.items():
        if name == BASE_NAME or not NAME.fullmatch(name):
            raise UserError(
                f"an adapter cannot be called {name!r}: use lower-case letters, digits, '.', '_' and '-', and not {BASE_NAME!r}."
            )
        if "=" in str(path):
            raise UserError(
                f"{path}: the server cannot take an adapter from a path with '=' in it; move or rename that folder."
            )


def command(run: Run, adapters: Mapping[str, Path], port: int) -> Command:
    """What `serve` starts. Pure; raises `UserError` for a name that cannot be served."""
    check_names(adapters)
    return deploy_command(
        Job(run.profile, adapters=dict(adapters), port=port, concurrency=run.profile.evaluate.concurrency)
    )


@contextmanager
def serve(
    run: Run, adapters: Mapping[str, Path], *, port: int | None = None, ready_s: float = READY_S
) -> Iterator[PolicyServer]:
    """Start the server, wait until every policy has answered once, and end its whole tree on the way out, however that happens.

    Args:
        port: a free one when None. Raises `UserError` when it is taken.
        ready_s: deadline of the start, in seconds.

    Raises `WorkFailed` with the log's tail when the server dies, refuses an adapter or is not ready in time.
    """
    run, engine = with_engine(run)
    started = time.monotonic()
    wanted = _port(port)
    names = (BASE_NAME, *adapters)
    lines = _Lines()
    with spawn_child(
        command(run, adapters, wanted), run.log("serve"), name="the policy server", on_line=lines
    ) as child:
        # ms-swift takes the next free port without a word when ours went meanwhile: its own log line says which.
        told = 0.0
        while not lines.port:
            elapsed = time.monotonic() - started
            child.check()
            if lines.broken:
                raise child.failed(f"did not start ({lines.broken})")
            if elapsed > ready_s:
                raise child.failed(f"was not ready within {ready_s:g} s")
            if elapsed >= told:
                run.progress("serve", 0, 0, f"loading the engine, {elapsed:.0f} s")
                told += TELL_S
            time.sleep(POLL_S)
        url = f"http://127.0.0.1:{lines.port}/v1"
        with httpx.Client(trust_env=False) as client:
            listed = _models(client, url)
            if listed != names:
                raise child.failed(f"serves {', '.join(listed) or 'nothing'} instead of {', '.join(names)}")
            for done, name in enumerate(names):
                run.progress("serve", done, len(names), f"first answer of {name}")
                _first_answer(client, url, name, child)
        start_s = time.monotonic() - started
        run.event("served", seconds=round(start_s, 1), engine=engine, names=names)
        yield PolicyServer(url, names, start_s, engine, child, lines)


def _port(asked: int | None) -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", asked or 0))
        except OSError:
            raise UserError(
                f"port {asked} is taken by another process; name another one, or none to let a free one be found."
            ) from None
        return int(probe.getsockname()[1])


def _models(client: httpx.Client, url: str) -> tuple[str, ...]:
    response = client.get(f"{url}/models", timeout=30)
    response.raise_for_status()
    return tuple(model["id"] for model in response.json()["data"])


def _first_answer(client: httpx.Client, url: str, name: str, child: Child) -> None:
    """One token of each policy: loads its adapter, so that a broken one fails here by name and not in every episode."""
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    try:
        response = client.post(f"{url}/chat/completions", json=body, timeout=FIRST_ANSWER_S)
    except httpx.HTTPError as error:
        raise child.failed(f"did not answer as {name!r} ({type(error).__name__})") from error
    if response.status_code != 200:
        raise WorkFailed(
            f"the policy server cannot use {name!r} (HTTP {response.status_code}: {' '.join(response.text.split())[:400]})."
        )
