"""Hand a step to the `gpu` pool: one deployment run, watched to its end, cancelled when we end first, its typed result read back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext, TaskRunContext
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.states import Cancelling

from configs.errors import WorkFailed
from configs.manifest import Step, StepResult
from configs.run import Run
from tasks_lib.caching import plain
from tasks_lib.policy import Interrupted

POLL_S: Final = 1.0
PATIENCE_S: Final = 120.0
"""How long the server may be away (a restart) before the step counts as interrupted, in seconds."""


def submit(step: Step, run: Run, arguments: dict[str, Any], key: str) -> StepResult:
    """Run the deployment `step/step` as a part of `run` and return what its flow returned.

    `key` is the step's digest. The idempotency key adds the parent's run and this try, so that a submit repeated by the client starts no second
    child, and a new try starts a new one. Raises `WorkFailed` with the child's own words, `Interrupted` when it crashed.
    """
    task, flow = TaskRunContext.get(), FlowRunContext.get()
    assert task is not None, "a step is submitted from its task run"
    parent = flow.flow_run if flow else None
    idempotency = f"{key}:{task.task_run.flow_run_id}:{parent.run_count if parent else 0}.{task.task_run.run_count}"
    parameters = {"joined": str(run.folder), "force": sorted(run.force), **plain(arguments)}
    with get_client(sync_client=True) as client, _cancelled_with_us(client, idempotency):
        child: FlowRun = run_deployment(  # type: ignore[assignment]
            f"{step}/{step}", parameters=parameters, timeout=0, tags=["gpu", step], idempotency_key=idempotency
        )
        ended = _wait(client, child.id)
    state = ended.state
    assert state is not None
    if state.is_completed():
        return StepResult.model_validate(state.result())
    words = f"{step}: its run {ended.name!r} ended as {state.name}: {state.message or 'no message'}"
    raise Interrupted(words) if state.is_crashed() else WorkFailed(words)


def _wait(client: SyncPrefectClient, child: UUID) -> FlowRun:
    log = get_run_logger()
    last, heard = "", time.monotonic()
    while True:
        try:
            now = client.read_flow_run(child)
            heard = time.monotonic()
        except httpx.TransportError as error:
            if time.monotonic() - heard > PATIENCE_S:
                raise Interrupted(f"Prefect's server has not answered for {PATIENCE_S:.0f} s ({error})") from error
        else:
            name = (now.state.name if now.state else None) or "?"
            if name != last:
                log.info(
                    "%s is %s%s",
                    now.name,
                    name,
                    " (the gpu pool takes one run at a time)" if name == "Scheduled" else "",
                )
                last = name
            if now.state and now.state.is_final():
                return now
        time.sleep(POLL_S)


@contextmanager
def _cancelled_with_us(client: SyncPrefectClient, idempotency: str) -> Iterator[None]:
    """However we end (error, Ctrl-C, cancellation), the child does not outlive us.

    It is found by its idempotency key, so that an end between its creation and our learning its id leaves nothing behind either. All of it is
    plain synchronous code in the main thread: FACTS, a parent that waits in an event loop died 30 s late and left the child running.
    """
    try:
        yield
    except BaseException:
        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[idempotency]))
        for child in client.read_flow_runs(flow_run_filter=wanted):
            if child.state is None or not child.state.is_final():
                client.set_flow_run_state(child.id, Cancelling(message="the run that asked for it has ended"))
        raise
