"""A Prefect server and process workers as supervised children: they live under `output/.prefect` and never outlive us.

Imports no prefect itself: `PREFECT_HOME` and the server's address must be in the environment before prefect is first imported.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

from configs.errors import UserError
from training.launch import Command
from training.supervise import Child, spawn_child

STARTUP_S: Final = 120.0
"""A fresh SQLite takes 21 s on an idle machine (FACTS), and several times that on a busy one."""

SERVER: Final = [
    "-m",
    "uvicorn",
    "--factory",
    "prefect.server.api.server:create_app",
    "--log-level",
    "warning",
    "--lifespan",
    "on",
]
"""The server as one process, without the `prefect` command around it: half a start-up less, and nothing between us and it."""

QUIET: Final = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}

DATABASE: Final = "PREFECT_SERVER_DATABASE_"
"""Start of the variables that choose the server's database; PostgreSQL is the better one where anything is scheduled (FACTS)."""

HEARTBEAT_S: Final = 30
"""Seconds between two heartbeats of a worker's flow run; `tasks_lib.deploy` crashes a run whose heartbeats stop."""

FLUSH_S: Final = 10.0

KEYS: Final = ("LLM_API_KEY", "E2B_API_KEY", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING")
"""What a worker hands its flows: in its own environment, never in a parameter or a job variable, which Prefect stores in plain text."""


@contextmanager
def server(home: Path, log: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[str]:
    """A server of our own on a free port of loopback; yields the address of its API, healthy. Raises `WorkFailed` with its log's tail.

    `home` becomes its PREFECT_HOME: database and results. `meanwhile` is called while it starts.
    A port that is taken between our look and its start is tried again.
    """
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for attempt in range(3):
            port = _free_port()
            api = f"http://127.0.0.1:{port}/api"
            # The UI asks where the settings say that the API is.
            env = {
                **QUIET,
                "PREFECT_HOME": str(home),
                "PREFECT_SERVER_API_HOST": "127.0.0.1",
                "PREFECT_SERVER_API_PORT": str(port),
            }
            command = Command(
                [sys.executable, *SERVER, "--host", "127.0.0.1", "--port", str(port)],
                env,
                secrets=(DATABASE + "PASSWORD",),
            )
            child = stack.enter_context(
                spawn_child(command, log, name="Prefect's server", grace_s=5, environ=_without_prefect())
            )
            meanwhile()
            if _healthy(child, api, last=attempt == 2):
                yield api
                return
            stack.close()


@contextmanager
def worker(pool: str, api: str, home: Path, log: Path, *, limit: int | None = 1) -> Iterator[Child]:
    """A process worker of `pool`, and with it every flow run that it starts. `limit` bounds its runs at once."""
    # The keeper gives its child default signals: a worker that inherits an ignored SIGINT ignores its first SIGTERM too.
    argv = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
        "--name",
        f"{pool}-{os.getpid()}",
    ]
    env = {
        **QUIET,
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": api,
        "PREFECT_WORKER_QUERY_SECONDS": "1",  # 15 s between two runs at the default poll
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
    }
    command = Command(argv + (["--limit", str(limit)] if limit else []), env, secrets=KEYS)
    with spawn_child(command, log, name=f"the worker of pool {pool}") as child:
        yield child


@contextmanager
def connected(home: Path, log: Path) -> Iterator[str]:
    """The server that this process's flows report to: the one that PREFECT_API_URL names, else a supervised one of our own.

    Raises `UserError` when the named one does not answer.
    """
    given = os.environ.get("PREFECT_API_URL")
    # Never a second, unsupervised server: FACTS, `kill -9` of a flow leaves the ephemeral one that Prefect starts by itself.
    ours = {"PREFECT_HOME": str(home), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false", "DO_NOT_TRACK": "1"}
    ours.setdefault(
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", os.environ.get("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    )
    with ExitStack() as stack:
        if given:
            _answers(given)
        stack.enter_context(_environment(ours))
        api = given or stack.enter_context(server(home, log, meanwhile=_import_prefect))
        stack.enter_context(_environment({"PREFECT_API_URL": api}))
        stack.callback(_flush)
        yield api


def _import_prefect() -> None:
    import prefect.flows  # noqa: F401  # 3 s of our core, while the server takes the other one for three times that


def _flush() -> None:
    """Hand the server the last logs and events while it still lives; afterwards Prefect would retry into the void for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=FLUSH_S)
    EventsWorker.drain_all(timeout=FLUSH_S)


def _answers(api: str) -> None:
    try:
        found = httpx.get(f"{api.rstrip('/')}/health", timeout=10).is_success
    except httpx.HTTPError:
        found = False
    if not found:
        raise UserError(
            f"PREFECT_API_URL={api}: no Prefect server answers there; start it, or unset the variable to have one made for this run."
        )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    _tell_prefect()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _tell_prefect()


def _tell_prefect() -> None:
    """Prefect reads the environment once, when it is imported. Its threads see no `temporary_settings`, only these."""
    if "prefect.context" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def _healthy(child: Child, api: str, *, last: bool) -> bool:
    """Wait until the server answers. False when it ended at once for want of its port, and another try is left."""
    end = time.monotonic() + STARTUP_S
    while time.monotonic() < end:
        code = child.poll()
        if code is not None and not last and "address already in use" in child.tail():
            return False
        child.check()
        try:
            if httpx.get(f"{api}/health", timeout=5).is_success:
                return True
        except httpx.TransportError:
            time.sleep(0.1)
    raise child.failed(f"did not answer within {STARTUP_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _without_prefect() -> dict[str, str]:
    """Our environment without the settings of the user's own Prefect, which are for another server; its database stays theirs to choose."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_") or name.startswith(DATABASE)
    }
