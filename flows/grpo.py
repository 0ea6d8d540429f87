"""Train the SFT LoRA further by GRPO. A GPU step."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from configs.run import Layout
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="grpo", flow_run_name=run_name, persist_result=True, result_serializer="json")
def grpo(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    rows: Path | None = None,
    adapter: Path | None = None,
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """GRPO on `rows`, prepared here when not given, from `adapter`, by default the newest SFT LoRA."""
    from training.checkpoints import newest_adapter

    with opened(profile, overrides, joined, force, sandboxes=True) as run:
        step, layout = Steps(run), Layout(run.profile)
        rows = rows or step.rl_prepare(run.profile.rl_tasks, layout.rl_rows).outputs["rows"]
        return step.grpo(rows, adapter or newest_adapter(layout.sft))
