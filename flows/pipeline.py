"""The whole loop: collect → export → sft → rl-prepare → grpo → evaluate → infer → demo."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from configs.manifest import Step, StepResult
from configs.run import Layout
from tasks_lib.parameters import Overrides, check_splits, opened, run_name
from tasks_lib.show import publish_all
from tasks_lib.tasks import Steps


@flow(name="pipeline", flow_run_name=run_name, persist_result=True, result_serializer="json")
def pipeline(
    profile: str | None = None,
    overrides: Overrides = Overrides(),  # noqa: B008  # immutable in effect, and Prefect's form shows it
    deployed: bool = False,
    force: list[Step] = [],  # noqa: B006  # never changed, and Prefect's form shows it
    joined: Path | None = None,
) -> list[StepResult]:
    """Train an agent and show what it learned.

    Args:
        profile: shipped profile or YAML file; empty lets the hardware choose.
        overrides: values laid over the profile.
        deployed: run the GPU steps as deployments of their own on the `gpu` pool, instead of in this process.
        force: steps to run although a proved result is there.
        joined: folder of a run under way to belong to, whose profile is taken as it stands.
    """
    with opened(profile, overrides, joined, force, teacher=True, sandboxes=True) as run:
        check_splits(run.profile)
        step, p, layout = Steps(run, deployed), run.profile, Layout(run.profile)

        collected = step.collect(p.collect.tasks)
        exported = step.export(collected.outputs["trajectories"], p.evaluate.tasks, layout.sft_rows)
        tuned = step.sft(exported.outputs["rows"])
        prepared = step.rl_prepare(p.rl_tasks, layout.rl_rows)
        reinforced = step.grpo(prepared.outputs["rows"], tuned.outputs["adapter"])
        adapters = {"sft": tuned.outputs["adapter"], "grpo": reinforced.outputs["adapter"]}
        evaluated = step.evaluate(p.evaluate.tasks, adapters)
        inferred = step.infer(adapters, p.infer.query, None)
        shown = step.demo(
            collected.outputs["trajectories"],
            exported.outputs["rows"],
            inferred.outputs["inference"],
            evaluated.outputs["report"],
            p.paths.demo,
        )

        results = [collected, exported, tuned, prepared, reinforced, evaluated, inferred, shown]
        publish_all(
            run, results, f"Run `{run.run_id}`, profile `{p.name}`; profile, events and logs are in `{run.folder}`."
        )
        return results
