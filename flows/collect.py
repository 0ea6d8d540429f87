"""Let the teacher solve tasks in sandboxes."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="collect", flow_run_name=run_name, persist_result=True, result_serializer="json")
def collect(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """Episodes of the profile's training tasks; those already paid for are reused."""
    with opened(profile, overrides, joined, force, teacher=True, sandboxes=True) as run:
        return Steps(run).collect(run.profile.collect.tasks)
