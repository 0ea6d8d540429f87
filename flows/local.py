"""The pipeline in this process, against a Prefect server of our own: what `all` does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

from configs.errors import UserError
from configs.files import exclusive
from configs.manifest import Step, StepResult
from configs.run import Layout, Run


def run_all(run: Run, *, deployed: bool = False) -> list[StepResult]:
    """Run the whole loop for `run` and return what every step handed on.

    Holds the lock of `output/` and owns the server, which ends with us however we end; the one that PREFECT_API_URL names is used where it is set.
    Raises `UserError` when another run holds the folder, and whatever a step raises.
    """
    from tasks_lib.doctor import sandbox_problem
    from tasks_lib.parameters import check_splits
    from tasks_lib.server import connected

    layout = Layout(run.profile)
    # What would fail anyway is said now, and not after the server has started.
    check_splits(run.profile)
    if problem := sandbox_problem(run.profile):
        raise UserError(problem)
    with ExitStack() as stack:
        stack.enter_context(exclusive(layout.lock, f"{layout.output} (its lock {layout.lock.name})"))
        run.progress("prefect", 0, 1, "starting the server")
        api = stack.enter_context(connected(layout.prefect, run.log("prefect-server")))
        run.progress("prefect", 1, 1, f"{api.removesuffix('/api')} shows this run while it lasts")
        # Not before the server's address is set: prefect reads it when it is imported.
        from flows.pipeline import pipeline
        from tasks_lib.parameters import listener

        run.event("server", api=api)
        token = listener.set(run.report)
        try:
            return pipeline(deployed=deployed, force=cast(list[Step], sorted(run.force)), joined=run.folder)
        finally:
            listener.reset(token)
