"""Ask base and trained policies a question. A GPU step."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from configs.run import Layout
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="infer", flow_run_name=run_name, persist_result=True, result_serializer="json")
def infer(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    adapters: dict[str, Path] | None = None,
    query: str | None = None,
    queries: Path | None = None,
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """Answers of the base and of every adapter, by default the newest GRPO LoRA, to `query`, by default the profile's."""
    from training.checkpoints import newest_adapter

    with opened(profile, overrides, joined, force) as run:
        chosen = adapters or {"grpo": newest_adapter(Layout(run.profile).grpo)}
        return Steps(run).infer(chosen, query or run.profile.infer.query, queries)
