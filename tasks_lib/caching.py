"""A cache hit is proved: whether a step's result may be reused is asked of the step itself, whose manifest is the only judge.

Prefect's own record of a step is never trusted. A step knows what its result depends on and when it is unfinished (episodes that could not be scored
are tried again); no key made from a task's arguments does. So before each run the policy asks, and a yes is put where Prefect looks: its machinery
then shows the task as Cached and runs nothing, nor takes a place in the GPU pool's queue. A no leaves no key, and the step runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.results import get_result_store

from configs.errors import UserError, WorkFailed
from configs.files import digest_json
from configs.manifest import NotProved, Step, StepResult, asking
from configs.run import Run
from tasks_lib.steps import entry, function


@dataclass
class Proved(CachePolicy):
    """Key: step and what its manifest proves, inputs and outputs. There is none where the manifest proves nothing."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        found = prove(inputs["step"], inputs["run"], inputs["arguments"])
        if found is None:
            return None
        key = f"{found.step}-{digest_json([str(found.folder), found.digest])[:32]}.json"
        get_result_store().write(obj=found, key=key)
        return key


def prove(step: Step, run: Run, arguments: dict[str, Any]) -> StepResult | None:
    """The step's result when its own rule reuses it now, else None. Makes nothing."""
    if not entry(step).manifest or step in run.force:
        return None
    try:
        with asking():
            return function(step)(dataclasses.replace(run, report=lambda progress: None), **arguments)
    except (NotProved, UserError, WorkFailed):
        return None  # an error comes again, and is told, when the step is run now


def request_digest(step: Step, run: Run, arguments: dict[str, Any]) -> str:
    """Names what a flow run asks of a step, for the idempotency of a submit."""
    return digest_json([step, run.profile.model_dump(mode="json"), plain(arguments)])[:32]


def plain(value: Any) -> Any:
    """Arguments of a step as JSON: paths as text."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, Path) else value
