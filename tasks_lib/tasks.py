"""The steps as Prefect tasks. One task runs them all: proved, retried where that helps, in this process or on the GPU pool."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.states import Completed
from prefect.tasks import Task

from configs.errors import UserError, WorkFailed
from configs.manifest import Step, StepResult
from configs.run import Layout, Run
from tasks_lib import show
from tasks_lib.caching import Proved, request_digest
from tasks_lib.policy import RETRIES, RETRY_DELAYS_S, transient
from tasks_lib.steps import entry, function
from tasks_lib.submit import submit
from tasks_lib.watch import watching


def _one_sentence(record: logging.LogRecord) -> bool:
    """Prefect logs every failure with its traceback; what we say in a sentence (where, why, how to fix it) needs none."""
    if record.exc_info and isinstance(record.exc_info[1], UserError | WorkFailed):
        record.exc_info = None
    return True


for _logger in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_logger).addFilter(_one_sentence)


def _name() -> str:
    given: dict[str, Any] = task_run.parameters
    return f"{given['step']} {given['run'].profile.name}"


def _worth_another(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, BaseException) and transient(error)


@task(
    name="step",
    task_run_name=_name,
    cache_policy=Proved(),
    persist_result=True,
    result_serializer="json",
    retries=RETRIES,
    retry_delay_seconds=list(RETRY_DELAYS_S),
    retry_condition_fn=_worth_another,
)
def perform(step: Step, run: Run, arguments: dict[str, Any], deployed: bool) -> StepResult | State[StepResult]:
    """Run one step, or let the GPU pool run it. A result that its manifest proved is shown as Prefect's own `Cached`."""
    if deployed and entry(step).gpu:
        result = submit(step, run, arguments, request_digest(step, run, arguments))
    else:
        with watching(step, run.report) as report:
            result = function(step)(dataclasses.replace(run, report=report), **arguments)
    if result.reused:
        return Completed(name="Cached", message=f"reused: {result.why}", data=result)
    return result


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one flow run, each one call. All belong to `run`; GPU steps go to the GPU pool when `deployed`."""

    run: Run
    deployed: bool = False

    def collect(self, tasks: Path) -> StepResult:
        return self._do("collect", tasks=tasks)

    def export(self, trajectories: Path, heldout: Path, out: Path) -> StepResult:
        return self._do("export", trajectories=trajectories, heldout=heldout, out=out)

    def sft(self, rows: Path) -> StepResult:
        return self._do("sft", rows=rows)

    def rl_prepare(self, tasks: Path, out: Path) -> StepResult:
        return self._do("rl-prepare", tasks=tasks, out=out)

    def grpo(self, rows: Path, adapter: Path | None) -> StepResult:
        return self._do("grpo", rows=rows, adapter=adapter)

    def evaluate(self, tasks: Path, adapters: dict[str, Path]) -> StepResult:
        return self._do("evaluate", tasks=tasks, adapters=adapters)

    def infer(self, adapters: dict[str, Path], query: str | None = None, queries: Path | None = None) -> StepResult:
        return self._do("infer", adapters=adapters, query=query, queries=queries)

    def demo(self, trajectories: Path, rows: Path, inference: Path, report: Path, out: Path) -> StepResult:
        return self._do("demo", trajectories=trajectories, rows=rows, inference=inference, report=report, out=out)

    def _do(self, name: Step, **arguments: Any) -> StepResult:
        """One step: its result, shown to people whether it was made or reused."""
        storage = Layout(self.run.profile).prefect / "storage"
        storage.mkdir(parents=True, exist_ok=True)
        state: State[Any] = perform.with_options(result_storage=storage)(
            name, self.run, arguments, self.deployed, return_state=True
        )
        result = state.result()
        assert isinstance(result, StepResult)
        get_run_logger().info("%s", show.sentence(result))
        show.publish(result)
        return result
