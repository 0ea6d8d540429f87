"""One prompt in a fresh sandbox, without a verifier: what `agentexecutor run` does."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
import uuid
from typing import Final

from agents.episode import Settings, run_and_keep
from agents.llm import MakeLLM
from agents.task import Task, Verifier
from agents.teachers import make_llm
from agents.trajectory import Trajectory
from configs.errors import UserError
from configs.profile import Profile
from sandboxes import SandboxPool, make_for

SHOWN_BYTES: Final = 20_000
"""Of each file that the agent left, at most this much is shown."""


def run_prompt(profile: Profile, prompt: str) -> tuple[Trajectory, dict[str, str]]:
    """Run the teacher on `prompt`; returns the trajectory (not scored: nothing checks it) and the files it left, by name.

    Raises `UserError` where the profile's backend or teacher cannot run here.
    """
    if profile.teacher.llm == "scripted":
        raise UserError(
            "the scripted teacher replays reference solutions, and a prompt has none: use --llm mock, or name a model (LLM_MODEL)."
        )
    if not prompt.strip():
        raise UserError("the prompt is empty: say what the agent shall do.")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(
            "the prompt is not valid UTF-8 text: give it in the encoding of your terminal, which must be UTF-8."
        ) from None
    name = "prompt-" + hashlib.sha256(prompt.encode()).hexdigest()[:8]
    task = Task(id=name, prompt=prompt, verifier=Verifier(command="true"))  # never graded
    return asyncio.run(_run(profile, task, make_llm(profile)))


async def _run(profile: Profile, task: Task, llm: MakeLLM) -> tuple[Trajectory, dict[str, str]]:
    run_id, collect = f"run-{uuid.uuid4().hex[:8]}", profile.collect
    settings = Settings(
        tools=collect.tools,
        max_turns=collect.max_turns,
        max_tokens=profile.teacher.max_tokens,
        tries=collect.tries,
        run_id=run_id,
        grade=None,
    )
    pool = SandboxPool(
        make_for(profile.sandboxes), run_id=run_id, concurrency=1, lifetime_s=profile.sandboxes.lifetime_s
    )
    async with pool:
        trajectory, archive = await run_and_keep(task, llm, pool, settings)
    if trajectory.extra.get("fatal"):
        raise UserError(trajectory.outcome.reason)
    return trajectory, _texts(archive) if archive else {}


def _texts(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {}
        for member in tar:
            data = tar.extractfile(member) if member.isreg() else None
            if data is not None:
                found[member.name] = data.read(SHOWN_BYTES).decode(errors="replace")
    return found
