"""What follows an assistant turn: its calls run in order, or, when any part of the turn is wrong, nothing runs and each error is shown.

All or nothing, because a later call usually builds on an earlier one: running the second after the first was refused would do something that the
model never meant. The builtin loop and the GRPO scheduler both use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.task import Limits, ToolCall
from agents.tools import error_text, run_call, validate
from agents.trajectory import Message
from sandboxes.base import Sandbox


@dataclass(frozen=True, slots=True)
class Answered:
    messages: list[Message]
    """One tool message for each call, in order, then one for each call that could not be read."""
    well_formed: bool
    """Whether every call of the turn could be run."""


def problems(calls: Sequence[ToolCall], names: Sequence[str]) -> list[str | None]:
    """For each call what is wrong with it, or None: unknown tool, wrong arguments, an id that an earlier call of the turn has."""
    found: list[str | None] = []
    for place, call in enumerate(calls):
        repeated = bool(call.id) and any(call.id == earlier.id for earlier in calls[:place])
        found.append(
            f"the id {call.id!r} is already used by an earlier call of this turn" if repeated else validate(call, names)
        )
    return found


async def answer(
    box: Sandbox, calls: Sequence[ToolCall], errors: Sequence[str], names: Sequence[str], limits: Limits
) -> Answered:
    """Run the turn. `errors` are the sentences for what could not be read. Raises `SandboxError` when the infrastructure failed."""
    wrong = problems(calls, names)
    if errors or any(wrong):
        skipped = "not run, because another call of the same turn was wrong"
        shown = [_message(call, error_text(why or skipped)) for call, why in zip(calls, wrong, strict=True)]
        return Answered(shown + [Message(role="tool", content=error_text(error)) for error in errors], False)
    results = []
    for call in calls:
        results.append(_message(call, await run_call(box, call, limits)))
    return Answered(results, True)


def _message(call: ToolCall, content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)
