"""The collect step: the teacher solves tasks in sandboxes; every finished episode is kept at once, and reused by task, agent, model and attempt."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from agents.episode import Settings
from agents.gather import Wanted, gather
from agents.prompts import initial_messages
from agents.store import episode_path, read_episode, write_episode, write_trajectories
from agents.task import Task, load_tasks
from agents.teachers import make_llm
from agents.tools import schemas
from agents.trajectory import SCHEMA_VERSION, Trajectory, Verdict
from configs.errors import UserError, WorkFailed
from configs.files import digest_json, exclusive
from configs.manifest import StepResult, read_manifest, run_step
from configs.profile import Profile
from configs.run import Layout, Run
from sandboxes import SandboxPool, make_for

VERSION: Final = 1
"""Raised when the same inputs would give other trajectories."""


def collect(run: Run, tasks: Path) -> StepResult:
    """Collect `samples_per_task` episodes of each task into `Layout.trajectories`.

    One failure costs one episode: it is a `not_scored` row, counted in the summary, and collected again by the next call. Raises `UserError` for a bad
    task file, a bad key or a missing backend, and `WorkFailed` when not a single episode could be scored.
    """
    loaded = load_tasks(tasks)
    layout = Layout(run.profile)
    layout.data.mkdir(parents=True, exist_ok=True)
    with exclusive(layout.data / ".collect.lock", f"the collection in {layout.data}"):
        return run_step(
            "collect",
            version=VERSION,
            inputs=_inputs(run.profile, loaded),
            candidates=lambda: _whole(layout.data),
            make=lambda: _make(run, loaded, layout),
            force="collect" in run.force,
        )


def _inputs(profile: Profile, tasks: Sequence[Task]) -> dict[str, str]:
    teacher = (
        profile.teacher.model_dump()
        if profile.teacher.llm not in ("scripted", "mock")
        else {"llm": profile.teacher.llm}
    )
    settings = profile.collect
    return {
        "tasks": digest_json([[task.id, task.digest] for task in tasks]),
        "teacher": digest_json([teacher, profile.teacher.agent, settings.max_turns]),
        "samples": str(settings.samples_per_task),
        "tools": digest_json(schemas(settings.tools)),
        "backend": f"{profile.sandboxes.backend} {profile.sandboxes.template} network={profile.sandboxes.network}",
        "schema": str(SCHEMA_VERSION),
    }


def _whole(folder: Path) -> list[Path]:
    """A collection with episodes that could not be scored is not finished: they are tried again, and only they."""
    manifest = read_manifest(folder)
    return [folder] if manifest is not None and not manifest.summary.get("not_scored") else []


def _make(run: Run, tasks: Sequence[Task], layout: Layout) -> tuple[Path, dict[str, Path], dict[str, Any]]:
    teacher = make_llm(run.profile)
    for task in tasks:
        teacher(task)  # a missing key, agent or reference solution is said before anything starts
    started = time.monotonic()
    wanted = [Wanted(task, attempt) for task in tasks for attempt in range(run.profile.collect.samples_per_task)]
    kept = {} if "collect" in run.force else _reusable(run, wanted, layout)
    todo = [item for item in wanted if (item.task.id, item.attempt) not in kept]
    counts: Counter[Verdict] = Counter(t.outcome.verdict for t in kept.values())

    def keep(trajectory: Trajectory) -> None:
        write_episode(layout.episodes, trajectory)
        counts[trajectory.outcome.verdict] += 1
        scored = counts[Verdict.PASSED] + counts[Verdict.FAILED]
        note = f"{counts[Verdict.NOT_SCORED]} not scored" if counts[Verdict.NOT_SCORED] else ""
        rate = {"pass_rate": counts[Verdict.PASSED] / scored} if scored else {}
        run.progress("collect", counts.total(), len(wanted), note, **rate)

    run.progress("collect", len(kept), len(wanted), f"{len(kept)} reused" if kept else "")
    made = _finish(_collect(run, todo, keep)) if todo else []
    everything = {**kept, **{(t.task_id, t.attempt): t for t in made}}
    trajectories = [everything[item.task.id, item.attempt] for item in wanted]
    write_trajectories(layout.trajectories, trajectories)
    summary = summarise(trajectories, reused=len(kept), new=made, seconds=time.monotonic() - started)
    run.event("collect", **summary)
    if not summary["passed"] + summary["failed"]:
        reason = trajectories[0].outcome.reason
        raise WorkFailed(
            f"none of {len(trajectories)} episodes could be scored; the first: {reason.rstrip('.')}. They are kept in {layout.episodes}."
        )
    return layout.data, {"trajectories": layout.trajectories}, summary


async def _collect(run: Run, todo: Sequence[Wanted], keep: Any) -> list[Trajectory]:
    profile = run.profile
    settings = Settings(
        tools=profile.collect.tools,
        max_turns=profile.collect.max_turns,
        max_tokens=profile.teacher.max_tokens,
        tries=profile.collect.tries,
        agent=profile.teacher.agent,
        run_id=run.run_id,
    )
    width = profile.collect.concurrency
    pool = SandboxPool(
        make_for(profile.sandboxes), run_id=run.run_id, concurrency=width, lifetime_s=profile.sandboxes.lifetime_s
    )
    async with pool:
        return await gather(todo, make_llm(profile), pool, settings, concurrency=width, keep=keep)


def _reusable(run: Run, wanted: Sequence[Wanted], layout: Layout) -> dict[tuple[str, int], Trajectory]:
    """Episodes already there that still answer the same question: same tools, same prompt, and a verdict."""
    profile = run.profile
    offered = schemas(profile.collect.tools)
    model = profile.teacher.llm
    found = {}
    for item in wanted:
        path = episode_path(layout.episodes, item.task.digest, profile.teacher.agent, model, item.attempt)
        try:
            trajectory = read_episode(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except UserError as error:
            # Named and set aside, not deleted: someone may have paid for it. Only this one is collected again.
            path.replace(path.with_suffix(".damaged"))
            run.event("damaged_episode", path=str(path), why=str(error))
            run.progress(
                "collect", 0, len(wanted), f"{path.name} in {path.parent} is damaged: set aside and collected again"
            )
            continue
        same = trajectory.tools == offered and trajectory.messages[:2] == initial_messages(item.task)
        if same and trajectory.task_digest == item.task.digest and trajectory.outcome.verdict is not Verdict.NOT_SCORED:
            found[item.task.id, item.attempt] = trajectory.model_copy(update={"task_id": item.task.id})
    return found


def summarise(
    trajectories: Sequence[Trajectory], *, reused: int, new: Sequence[Trajectory], seconds: float
) -> dict[str, Any]:
    """Counts for people. `cost_usd` is what this call paid: None while any new call's price is unknown."""
    verdicts = Counter(t.outcome.verdict for t in trajectories)
    scored = verdicts[Verdict.PASSED] + verdicts[Verdict.FAILED]
    costs = [t.usage.cost_usd for t in new if t.usage.calls]
    known = [cost for cost in costs if cost is not None]
    summary: dict[str, Any] = {
        "episodes": len(trajectories),
        "passed": verdicts[Verdict.PASSED],
        "failed": verdicts[Verdict.FAILED],
        "not_scored": verdicts[Verdict.NOT_SCORED],
        "reused": reused,
        "pass_rate": verdicts[Verdict.PASSED] / scored if scored else None,
        "cost_usd": sum(known) if known and len(known) == len(costs) else None,
        "tokens": sum(t.usage.prompt_tokens + t.usage.completion_tokens for t in new),
        "seconds": round(seconds, 2),
        "stop_reasons": dict(Counter(str(t.stop_reason) for t in trajectories)),
    }
    reasons = Counter(t.outcome.reason for t in trajectories if t.outcome.verdict is Verdict.NOT_SCORED)
    if reasons:
        summary["not_scored_because"] = dict(reasons.most_common(5))
    return summary


def _finish(work: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
    """Run to the end; SIGTERM cancels as Ctrl-C does, so that sandboxes are killed on the way out."""

    async def main() -> list[Trajectory]:
        with _cancelled_by_sigterm():
            return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield  # a Prefect task's thread: signals are the flow's own business there
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
