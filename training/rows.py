"""Training rows from trajectories, in ms-swift's agent format, and why an episode makes none. Pure.

A row is `{"tools": "<JSON>", "messages": [...], "task_id": …, "task_digest": …}`. Tools and calls are JSON *strings*: Arrow would otherwise mix the
schemas of different rows and fill them with nulls (ms-swift #10125). Roles are system, user, assistant, tool_call and tool_response; only
assistant and tool_call are trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any, Final

from agents.parsing import OPEN
from agents.prompts import initial_messages
from agents.task import Task, ToolCall
from agents.trajectory import Message, StopReason, Trajectory, Verdict
from configs.files import digest_json
from configs.profile import Model

Row = dict[str, Any]

NEAR: Final = 0.95
"""Two solutions of one prompt at least this similar (difflib's ratio of the normalised text) count as one."""


class Dropped(StrEnum):
    """Why an episode makes no row. The first that applies is counted."""

    NOT_SCORED = "not_scored"
    """Infrastructure failed: nothing is known about the work."""
    FAILED = "failed"
    CONTRADICTORY = "contradictory"
    """The same work on the same task both passed and failed, or a record that passed and says that it never ended by itself."""
    HELDOUT = "heldout_overlap"
    """The task is also a held-out one: same digest, or the same prompt up to case, spaces and punctuation."""
    BROKEN_CALLS = "broken_calls"
    """A turn whose calls and results do not pair up: it would teach calls that nobody could read."""
    NO_WORK = "no_work"
    """Passed without a single turn."""
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"


@dataclass
class Export:
    rows: list[Row] = field(default_factory=list)
    dropped: dict[Dropped, list[str]] = field(default_factory=lambda: {reason: [] for reason in Dropped})
    """Reason → names of the episodes, `task#attempt`."""
    families: dict[str, int] = field(default_factory=dict)
    """Family → rows."""


def select(trajectories: Sequence[Trajectory], heldout: Iterable[Task], model: Model) -> Export:
    """Rows of the verified episodes, in a stable order, and everything else under its reason."""
    export = Export()
    reserved = list(heldout)
    digests = {task.digest for task in reserved}
    prompts = {normalised(task.prompt) for task in reserved}
    disputed = _disputed(trajectories)
    exact: set[str] = set()
    similar: dict[str, list[str]] = {}
    for episode in sorted(trajectories, key=lambda t: (t.task_id, t.task_digest, t.agent, t.model, t.attempt)):
        row: Row | None = None
        reason = _refused(episode, digests, prompts, disputed)
        if reason is None:
            row = to_row(episode, model)
            reason = Dropped.BROKEN_CALLS if row is None else _seen(row, exact, similar)
        if reason is not None or row is None:
            export.dropped[reason or Dropped.BROKEN_CALLS].append(f"{episode.task_id}#{episode.attempt}")
            continue
        export.rows.append(row)
        export.families[episode.family] = export.families.get(episode.family, 0) + 1
    return export


def to_row(episode: Trajectory, model: Model) -> Row | None:
    """The episode's own messages as a row; None when its calls and results do not pair up."""
    messages: list[dict[str, str]] = []
    waiting: list[ToolCall] = []
    raw_turn = False
    for message in episode.messages:
        if message.role == "tool":
            if raw_turn:
                messages.append({"role": "tool_response", "content": message.content})
                continue
            if not waiting or (message.tool_call_id and message.tool_call_id != waiting[0].id):
                return None
            waiting.pop(0)
            messages.append({"role": "tool_response", "content": message.content})
            continue
        if waiting:
            return None
        if message.role == "assistant":
            raw_turn = OPEN in message.content  # a policy's turn: its text holds the calls, exactly as sampled
            waiting = [] if raw_turn else list(message.tool_calls)
            messages += _assistant(message, model)
        else:
            messages.append({"role": message.role, "content": message.content})
    while messages and messages[-1]["role"] == "tool_response":
        messages.pop()  # an episode that ran out of turns: a result after the last call teaches nothing
    return {
        "tools": json.dumps(episode.tools, ensure_ascii=False),
        "messages": messages,
        **columns(episode.task_id, episode.task_digest, model),
    }


def prompt_row(task: Task, tools: Sequence[Mapping[str, Any]], model: Model) -> Row:
    """What a rollout of `task` starts from: the same bytes as the start of its SFT row."""
    return {
        "tools": json.dumps(list(tools), ensure_ascii=False),
        "messages": [{"role": message.role, "content": message.content} for message in initial_messages(task)],
        **columns(task.id, task.digest, model),
    }


def columns(task_id: str, task_digest: str, model: Model) -> Row:
    """The further columns of every row. The effort of thinking travels here, because ms-swift has no flag for it."""
    effort = {"chat_template_kwargs": {"reasoning_effort": "low"}} if model.thinking == "low" else {}
    return {"task_id": task_id, "task_digest": task_digest, **effort}


def normalised(text: str) -> str:
    """Lower case, words only, single spaces: equal for prompts that differ in nothing a reader would call a difference."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _assistant(message: Message, model: Model) -> list[dict[str, str]]:
    text = message.content
    if message.reasoning and model.thinking == "low" and "<think>" not in text:
        text = f"<think>\n{message.reasoning.strip()}\n</think>\n\n{text}"
    if OPEN in text or not message.tool_calls:
        return [{"role": "assistant", "content": text}]
    # Hermes puts the calls right behind the text; the line break between them is ours to write. Qwen3.5's template writes its own.
    ending = "\n" if model.agent_template == "hermes" else ""
    before = [{"role": "assistant", "content": text.rstrip() + ending}] if text.strip() else []
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return [*before, *({"role": "tool_call", "content": json.dumps(call, ensure_ascii=False)} for call in calls)]


_UNENDED: Final = frozenset({StopReason.INFRA_ERROR, StopReason.AGENT_ERROR, StopReason.CANCELLED})


def _refused(episode: Trajectory, digests: set[str], prompts: set[str], disputed: set[str]) -> Dropped | None:
    if episode.outcome.verdict is Verdict.NOT_SCORED:
        return Dropped.NOT_SCORED
    if _work(episode) in disputed or (episode.outcome.verdict is Verdict.PASSED and episode.stop_reason in _UNENDED):
        return Dropped.CONTRADICTORY
    if episode.outcome.verdict is Verdict.FAILED:
        return Dropped.FAILED
    asked = [message.content for message in episode.messages if message.role == "user"]
    if episode.task_digest in digests or any(normalised(prompt) in prompts for prompt in asked[:1]):
        return Dropped.HELDOUT
    if not any(message.role == "assistant" for message in episode.messages):
        return Dropped.NO_WORK
    return None


def _disputed(trajectories: Iterable[Trajectory]) -> set[str]:
    """Work that was judged both ways: the verifier, not the work, made the difference."""
    verdicts: dict[str, set[Verdict]] = {}
    for episode in trajectories:
        if episode.outcome.verdict is not Verdict.NOT_SCORED:
            verdicts.setdefault(_work(episode), set()).add(episode.outcome.verdict)
    return {work for work, seen in verdicts.items() if len(seen) > 1}


def _work(episode: Trajectory) -> str:
    """Digest of a task and of everything that the agent did in it."""
    done = [
        [m.content, [[c.name, c.arguments] for c in m.tool_calls]] for m in episode.messages if m.role == "assistant"
    ]
    return digest_json([episode.task_digest, done])


def _seen(row: Row, exact: set[str], similar: dict[str, list[str]]) -> Dropped | None:
    key = digest_json([row["tools"], row["messages"]])
    if key in exact:
        return Dropped.DUPLICATE
    exact.add(key)
    # Only answers to the same prompt are compared: two tasks that differ in one word are two tasks.
    prompt = normalised(" ".join(m["content"] for m in row["messages"] if m["role"] in ("system", "user")))
    answer = " ".join(m["content"] for m in row["messages"] if m["role"] in ("assistant", "tool_call")).lower()
    answer = " ".join(answer.split())
    others = similar.setdefault(prompt, [])
    if any(_near(answer, other) for other in others):
        return Dropped.NEAR_DUPLICATE
    others.append(answer)
    return None


def _near(one: str, other: str) -> bool:
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return matcher.real_quick_ratio() >= NEAR and matcher.quick_ratio() >= NEAR and matcher.ratio() >= NEAR
