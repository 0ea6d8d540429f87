"""Pools, limits, deployments and the automation for lost runs, made idempotently on the Prefect server in use; says what changed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from configs.errors import UserError, WorkFailed
from configs.load import ROOT

POOLS: Final[dict[str, tuple[int, str]]] = {
    "cpu": (1, "Pipelines. One at a time: the next one waits instead of being refused by the lock of output/."),
    "gpu": (1, "GPU steps. One at a time, with every GPU of the machine."),
}
"""Process pool → runs at once, and what it is for."""

LOST_S: Final = 90
"""A run that sent heartbeats and has been silent for this long is Crashed. It must exceed the heartbeat, which tasks_lib/server.py sets to 30 s."""

LOST: Final = "agentexecutor: lost runs are crashed"

COMPARED: Final = (
    "entrypoint",
    "description",
    "tags",
    "parameters",
    "pull_steps",
    "work_pool_name",
    "parameter_openapi_schema",
)


def deploy(profile: str | None = None, *, dry_run: bool = False) -> list[str]:
    """Bring the server to what prefect.yaml says, and return in words what changed (or would).

    `profile` is a shipped name or the path of a YAML file that the deployments run with; None lets the worker's hardware choose. Raises `UserError`
    where no server is set, `WorkFailed` with Prefect's own words.
    """
    api = _api()
    environment = {"AGENTEXECUTOR_ROOT": str(ROOT), "AGENTEXECUTOR_PROFILE": _anywhere(profile)}
    try:
        changes = asyncio.run(_pools(dry_run))
        before = asyncio.run(_deployments())
        if dry_run:
            return changes + [f"deployment {name}: would be made" for name in _wanted() if name not in before]
        _register(environment)
        after = asyncio.run(_deployments())
        changes += [f"deployment {name}: made" for name in sorted(after.keys() - before.keys())]
        for name in sorted(after.keys() & before.keys()):
            changed = [field for field in after[name] if after[name][field] != before[name][field]]
            changes += [f"deployment {name}: {', '.join(changed)} changed"] if changed else []
        return changes + asyncio.run(_automation())
    except httpx.TransportError as error:
        raise UserError(
            f"Prefect's server at {api} does not answer ({error}); start it with `prefect server start`."
        ) from None


def _api() -> str:
    from prefect.settings import PREFECT_API_URL

    api = PREFECT_API_URL.value()
    if not api:
        raise UserError(
            "no Prefect server is set: run `prefect server start`, then `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`."
        )
    return str(api)


def _anywhere(profile: str | None) -> str:
    """A profile file by its whole path: the worker does not run where we do."""
    return str(Path(profile).absolute()) if profile and profile.endswith((".yaml", ".yml")) else profile or ""


async def _pools(dry_run: bool) -> list[str]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.workers.process import ProcessWorker

    changes = []
    async with get_client() as client:
        known = {pool.name: pool for pool in await client.read_work_pools()}
        for name, (limit, what) in POOLS.items():
            pool = known.get(name)
            if pool is None:
                changes.append(f"pool {name}: {'would be made' if dry_run else 'made'}, {limit} run at a time")
                template = ProcessWorker.get_default_base_job_template()
                wanted = WorkPoolCreate(
                    name=name, type="process", description=what, base_job_template=template, concurrency_limit=limit
                )
                if not dry_run:
                    await client.create_work_pool(wanted)
            elif pool.type != "process":
                raise UserError(
                    f"pool {name!r} exists on this server and is a {pool.type} pool; these flows need a process pool: rename or delete it."
                )
            elif pool.concurrency_limit != limit:
                changes.append(
                    f"pool {name}: limit {pool.concurrency_limit} {'would become' if dry_run else 'became'} {limit}"
                )
                if not dry_run:
                    await client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
    return changes


def _wanted() -> list[str]:
    """`flow/deployment` of every entry of prefect.yaml."""
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    return [f"{entry['entrypoint'].rsplit(':', 1)[1]}/{entry['name']}" for entry in entries]


async def _deployments() -> dict[str, dict[str, Any]]:
    """Ours on the server: what can differ of each."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    found: dict[str, dict[str, Any]] = {}
    async with get_client() as client:
        for name in _wanted():
            try:
                one = await client.read_deployment_by_name(name)
            except ObjectNotFound:
                continue
            schedules = sorted([s.slug, s.active, s.schedule.model_dump(mode="json")] for s in one.schedules)
            found[name] = {field: getattr(one, field) for field in COMPARED} | {"schedules": schedules}
    return found


def _register(environment: dict[str, str]) -> None:
    """Prefect's own reader of prefect.yaml: what stands there is the only truth about deployments."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "prefect.yaml"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        raise WorkFailed(
            f"`prefect deploy` failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )


async def _automation() -> list[str]:
    """Engine and worker killed at once would leave a run Running for ever (FACTS); its heartbeats stop, and this says Crashed."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    wanted = AutomationCore(
        name=LOST,
        description=f"A flow run whose heartbeats stop for {LOST_S} s is Crashed; its slot is free and it can be run again.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={
                "prefect.flow-run.heartbeat",
                *(f"prefect.flow-run.{end}" for end in ("Completed", "Failed", "Cancelled", "Crashed")),
            },
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=LOST_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name=None,
                force=False,
                message=f"no heartbeat for {LOST_S} s: its process is gone",
            )
        ],
    )
    async with get_client() as client:
        known = await client.read_automations_by_name(LOST)
        if not known:
            await client.create_automation(wanted)
            return ["automation for lost runs: made"]
        if known[0].model_dump(include={"trigger", "actions"}) != wanted.model_dump(include={"trigger", "actions"}):
            await client.update_automation(known[0].id, wanted)
            return ["automation for lost runs: changed"]
        return []
