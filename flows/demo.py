"""Refresh the demo bundle from what the steps left."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="demo", flow_run_name=run_name, persist_result=True, result_serializer="json")
def demo(
    trajectories: Path,
    rows: Path,
    inference: Path,
    report: Path,
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """The bundle from exactly these files."""
    with opened(profile, overrides, joined, force) as run:
        return Steps(run).demo(trajectories, rows, inference, report, run.profile.paths.demo)
