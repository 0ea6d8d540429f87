"""Show one trajectory to a person: every turn, call and result, then the verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from agents.trajectory import Message, Trajectory
from configs.errors import UserError
from configs.files import read_jsonl

_T = TypeVar("_T")

CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What could drive or mislead the terminal of whoever looks (escape sequences, carriage returns, text direction), or not be printed at all."""

MARKS: Final = {"system": "system", "user": "user", "assistant": "agent", "tool": "result"}


def open_trajectory(path: Path, index: int = 0) -> Trajectory:
    """Trajectory `index` of an episode file, a JSONL of rollouts or a parquet of trajectories. Raises `UserError` for anything else."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; episodes lie under data/episodes/.")
    if path.suffix == ".parquet":
        from agents.store import load_trajectories

        return _pick(load_trajectories(path), path, index)
    rows = read_jsonl(path) if path.suffix == ".jsonl" else [_json(path)]
    try:
        return Trajectory.model_validate(_pick(rows, path, index))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{path}: is not a trajectory record ({'.'.join(map(str, first['loc']))}: {first['msg']})."
        ) from None


def render_trajectory(trajectory: Trajectory, files: Mapping[str, str] | None = None) -> str:
    """The trajectory as text, and below it the files that the agent left, where they are given."""
    lines = [f"task {trajectory.task_id} · {trajectory.agent} · {trajectory.model} · attempt {trajectory.attempt}"]
    for message in trajectory.messages:
        lines += _message(message)
    outcome = trajectory.outcome
    lines.append("")
    lines.append(
        f"stopped: {trajectory.stop_reason} · verdict: {outcome.verdict}"
        + (f" ({outcome.reason})" if outcome.reason else "")
    )
    usage = trajectory.usage
    cost = "unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
    lines.append(
        f"{usage.calls} calls · {usage.prompt_tokens} + {usage.completion_tokens} tokens · cost {cost} · {trajectory.timings.get('total', 0.0):.2f} s"
    )
    for name, text in (files or {}).items():
        lines += ["", f"── {name}", text.rstrip("\n")]
    return CONTROL.sub(lambda found: _escaped(ord(found[0])), "\n".join(lines))


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _message(message: Message) -> list[str]:
    lines = ["", f"[{MARKS[message.role]}] {message.content}".rstrip()]
    lines += [f"  → {call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in message.tool_calls]
    return lines


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}).") from None


def _pick(rows: list[_T], path: Path, index: int) -> _T:
    if index >= len(rows):
        raise UserError(
            f"{path}: holds {len(rows)} trajectories; --index {index} is not among them (0 to {len(rows) - 1})."
        )
    return rows[index]
