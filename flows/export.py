"""Write verified episodes as training rows."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from configs.run import Layout
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="export", flow_run_name=run_name, persist_result=True, result_serializer="json")
def export(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    trajectories: Path | None = None,
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """Rows for SFT, with a count for every reason to drop. `trajectories` defaults to what collect wrote."""
    with opened(profile, overrides, joined, force) as run:
        layout = Layout(run.profile)
        return Steps(run).export(trajectories or layout.trajectories, run.profile.evaluate.tasks, layout.sft_rows)
