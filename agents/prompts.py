"""The prompt, defined once: SFT rows, GRPO rollouts, evaluation and collection all start from these messages, byte for byte."""

from __future__ import annotations

from typing import Final

from agents.task import Task
from agents.trajectory import Message
from sandboxes.base import WORKSPACE

SYSTEM: Final = f"You are a coding agent. Use the tools to do the task in {WORKSPACE}."
"""Short, because a 135M model has to learn it and a laptop has to read it in every call."""


def initial_messages(task: Task) -> list[Message]:
    """What every attempt at `task` starts with: system and user. The tools travel beside the messages and the chat template renders them."""
    return [Message(role="system", content=SYSTEM), Message(role="user", content=task.prompt)]
