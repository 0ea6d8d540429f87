"""One prompt in a fresh sandbox, without a verifier: what `agentexecutor run` does."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
import time
import uuid
from typing import Final

from agents.collect import make_llm
from agents.llm import LLMError
from agents.loop import LoopResult, run_loop
from agents.prompts import initial_messages
from agents.task import Limits, Task, Verifier
from agents.tools import schemas
from agents.trajectory import Outcome, StopReason, Trajectory, Verdict
from agents.verifier import take_workspace
from configs.errors import UserError
from configs.profile import Profile
from sandboxes import SandboxError, SandboxPool, SandboxUnavailable, make_for

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
    name = "prompt-" + hashlib.sha256(prompt.encode()).hexdigest()[:8]
    task = Task(id=name, prompt=prompt, limits=Limits(), verifier=Verifier(command="true"))
    return asyncio.run(_run(profile, task))


async def _run(profile: Profile, task: Task) -> tuple[Trajectory, dict[str, str]]:
    llm = make_llm(profile)(task)
    result = LoopResult(initial_messages(task))
    reason, files, started = "no verifier: nothing was checked", {}, time.monotonic()
    pool = SandboxPool(
        make_for(profile.sandboxes),
        run_id=f"run-{uuid.uuid4().hex[:8]}",
        concurrency=1,
        lifetime_s=profile.sandboxes.lifetime_s,
    )
    async with pool:
        try:
            async with pool.sandbox() as box:
                collect = profile.collect
                await run_loop(
                    task,
                    box,
                    llm,
                    collect.tools,
                    max_turns=collect.max_turns,
                    max_tokens=profile.teacher.max_tokens,
                    result=result,
                )
                files = _texts(await take_workspace(box))
        except SandboxUnavailable as error:
            raise UserError(str(error)) from None
        except SandboxError as error:
            result.stop_reason, reason = StopReason.INFRA_ERROR, str(error)
        except LLMError as error:
            result.stop_reason, reason = error.policy.stop, str(error)
    trajectory = Trajectory(
        task_id=task.id,
        task_digest=task.digest,
        family=task.family,
        agent="builtin",
        model=llm.name,
        attempt=0,
        tools=schemas(profile.collect.tools),
        messages=result.messages,
        turns=result.turns,
        stop_reason=result.stop_reason,
        outcome=Outcome(verdict=Verdict.NOT_SCORED, reason=reason),
        usage=result.usage,
        timings={**result.timings, "total": time.monotonic() - started},
        run_id=pool.run_id,
    )
    return trajectory, files


def _texts(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {}
        for member in tar:
            data = tar.extractfile(member) if member.isreg() else None
            if data is not None:
                found[member.name] = data.read(SHOWN_BYTES).decode(errors="replace")
    return found
