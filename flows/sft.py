"""Train a LoRA on the exported rows. A GPU step."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from configs.run import Layout
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="sft", flow_run_name=run_name, persist_result=True, result_serializer="json")
def sft(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    rows: Path | None = None,
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """SFT of `rows`, which default to what export wrote."""
    with opened(profile, overrides, joined, force) as run:
        return Steps(run).sft(rows or Layout(run.profile).sft_rows)
