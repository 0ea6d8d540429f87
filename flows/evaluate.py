"""Let base and trained policies act on held-out tasks. A GPU step."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from configs.run import Layout
from tasks_lib.parameters import Overrides, opened, run_name
from tasks_lib.tasks import Steps


@flow(name="evaluate", flow_run_name=run_name, persist_result=True, result_serializer="json")
def evaluate(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008
    tasks: Path | None = None,
    adapters: dict[str, Path] | None = None,
    force: list[Step] = [],  # noqa: B006
    joined: Path | None = None,
) -> StepResult:
    """Real episodes of the base and of every adapter, by default the newest SFT and GRPO LoRA."""
    from training.checkpoints import newest_adapter

    with opened(profile, overrides, joined, force, sandboxes=True) as run:
        layout = Layout(run.profile)
        chosen = adapters or {"sft": newest_adapter(layout.sft), "grpo": newest_adapter(layout.grpo)}
        return Steps(run).evaluate(tasks or run.profile.evaluate.tasks, chosen)
