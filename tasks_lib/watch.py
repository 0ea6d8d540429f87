"""What people see while a step runs: its progress in an artifact and a bounded digest in Prefect's log, from a thread of its own.

The step's own thread only leaves its newest word here, so a slow or restarting server never holds up an episode or a trainer. FACTS: streaming a
trainer's lines through Prefect costs a database row each; one line every few seconds costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from configs.run import Progress

ARTIFACT_S: Final = 2.0
"""Shortest time between two updates of the progress artifact, in seconds."""

LOG_S: Final = 10.0
"""Shortest time between two lines in Prefect's log, in seconds."""


@contextmanager
def watching(step: str, report: Callable[[Progress], None]) -> Iterator[Callable[[Progress], None]]:
    """A sink of progress that passes every word on to `report` and the newest one to Prefect. Inside a task run only."""
    context = TaskRunContext.get()
    assert context is not None, "a step is watched from its task run"
    watcher = _Watcher(step, get_run_logger(), context.task_run.flow_run_id, context.task_run.id)
    thread = threading.Thread(target=watcher.work, name=f"watch-{step}", daemon=True)

    def sink(progress: Progress) -> None:
        report(progress)
        watcher.newest = progress

    thread.start()
    try:
        yield sink
    finally:
        watcher.ended.set()
        thread.join(timeout=10)


@dataclass
class _Watcher:
    step: str
    log: logging.Logger | logging.LoggerAdapter[logging.Logger]
    flow_run: UUID | None
    task_run: UUID
    newest: Progress | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    artifact: UUID | None = None

    def work(self) -> None:
        shown: Progress | None = None
        logged = 0.0
        with get_client(sync_client=True) as client:
            last = False
            while not last:
                last = self.ended.wait(ARTIFACT_S)  # the last word is shown too
                now = self.newest
                if now is None or now is shown:
                    continue
                if last or time.monotonic() - logged >= LOG_S:
                    self.log.info("%s", words(now))
                    logged = time.monotonic()
                try:
                    self._show(client, now)
                    shown = now
                except httpx.HTTPError as error:
                    self.log.warning(
                        "progress of %s cannot be shown now: Prefect's server says %s; the step goes on",
                        self.step,
                        error,
                    )

    def _show(self, client: SyncPrefectClient, now: Progress) -> None:
        percent = round(100 * min(now.done / now.total, 1.0), 1) if now.total else 0.0
        if self.artifact is None:
            wanted = ArtifactCreate(
                key=f"{self.step}-progress",
                type="progress",
                data=percent,
                description=words(now),
                flow_run_id=self.flow_run,
                task_run_id=self.task_run,
            )
            self.artifact = client.create_artifact(wanted).id
        else:
            client.update_artifact(self.artifact, ArtifactUpdate(data=percent, description=words(now)))


def words(progress: Progress) -> str:
    """One line: `sft 12/40 (step) loss 0.31`."""
    of = f"{progress.done}/{progress.total}" if progress.total else str(progress.done)
    note = f" ({progress.note})" if progress.note else ""
    return " ".join(
        [f"{progress.step} {of}{note}", *(f"{name} {value:.4g}" for name, value in progress.metrics.items())]
    )
