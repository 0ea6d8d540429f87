"""Who answers in an episode, by the profile's words: `scripted`, `mock`, or a litellm model."""

from __future__ import annotations

from agents.llm import LLM, MakeLLM
from agents.providers import LiteLLM, key
from agents.retry import Retrying
from agents.scripted import MockLLM, ScriptedLLM
from agents.task import Task
from configs.errors import UserError
from configs.profile import Profile


def make_llm(profile: Profile) -> MakeLLM:
    """The teacher's LLM for each try at a task. Raises `UserError` at once for a missing key, library or agent."""
    if profile.teacher.agent == "codex":
        raise UserError("the codex agent is not part of this version: use --agent builtin.")
    if profile.teacher.llm == "scripted":
        return ScriptedLLM
    if profile.teacher.llm == "mock":
        return lambda task: MockLLM()
    key()
    teacher = profile.teacher
    shared: LLM = Retrying(LiteLLM(teacher.llm, teacher.base_url, teacher.temperature))

    def same(task: Task) -> LLM:
        return shared

    return same
