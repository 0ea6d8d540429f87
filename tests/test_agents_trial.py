"""`agentexecutor run`: one prompt, no verifier, and the files that the agent left."""

from __future__ import annotations

import pytest

from agents.trajectory import StopReason, Verdict
from agents.trial import run_prompt
from agents.view import render_trajectory
from configs.errors import UserError
from configs.load import load_profile
from configs.profile import Profile


def profile(**flags: str) -> Profile:
    return load_profile("laptop", flags={"sandboxes.backend": "mock", "teacher.llm": "mock", **flags}, environ={})


def test_the_mock_model_writes_the_file_that_the_prompt_names() -> None:
    trajectory, files = run_prompt(profile(), "create /workspace/hi.py")
    assert files == {"hi.py": "print('hi')\n"}
    assert (trajectory.stop_reason, trajectory.outcome.verdict) == (StopReason.FINISHED, Verdict.NOT_SCORED)


@pytest.mark.parametrize(("prompt", "words"), [("", "empty"), (" \n", "empty"), ("a\udcff", "not valid UTF-8")])
def test_a_prompt_that_says_nothing_is_refused(prompt: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_prompt(profile(), prompt)


def test_the_scripted_teacher_has_nothing_to_replay_and_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLM_API_KEY", raising=False)
    with pytest.raises(UserError, match="a prompt has none"):
        run_prompt(profile(**{"teacher.llm": "scripted"}), "create hi.py")
    with pytest.raises(UserError, match="LLM_API_KEY is not set"):
        run_prompt(profile(**{"teacher.llm": "deepseek-chat"}), "create hi.py")


def test_what_an_agent_said_cannot_drive_the_terminal() -> None:
    trajectory, _ = run_prompt(profile(), "create hi.py")
    said = trajectory.messages[-1].model_copy(update={"content": "a\tb\nc\x1b[2J\x9b1m\r\x07\u202e\udcff"})
    text = render_trajectory(
        trajectory.model_copy(update={"messages": [said]}), {"x\x1b]0;t\x07": "\x1b[31mred", "ümlaut": "✓"}
    )
    assert "a\tb\nc\\x1b[2J\\x9b1m\\x0d\\x07\\u202e\\udcff" in text
    assert "\\x1b]0;t\\x07" in text
    assert "── ümlaut\n✓" in text
    assert [char for char in text if not char.isprintable() and char not in "\n\t"] == []
