"""Run by tests/test_agents_rendering.py inside the train environment: our tool calls against ms-swift's own agent templates."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swift.agent_template import agent_template_map

from agents.generate import LAPTOP, SEEDS, generate
from agents.parsing import Format, parse, render
from agents.task import ToolCall

FORMATS: list[Format] = ["hermes", "qwen3_5"]


def written(calls: list[ToolCall], format: Format) -> str:
    """The calls as ms-swift puts them into a training row."""
    rows = [
        {"role": "tool_call", "content": json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False)}
        for c in calls
    ]
    return str(agent_template_map[format]()._format_tool_calls(rows))


def check(calls: list[ToolCall], format: Format) -> None:
    text = written(calls, format)
    parsed = parse(text, format)
    assert parsed.errors == []
    assert [(c.name, c.arguments) for c in parsed.calls] == [(c.name, c.arguments) for c in calls]
    assert render(calls, format) == text


@pytest.mark.parametrize("format", FORMATS)
def test_every_reference_solution_is_rendered_by_ms_swift_and_read_back(format: Format) -> None:
    for tasks in generate(SEEDS["laptop"], LAPTOP).values():
        for task in tasks:
            check(task.solution, format)


VALUES = st.text(max_size=30).filter(lambda text: "</" not in text)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=200, deadline=None)
@given(contents=st.lists(VALUES, min_size=1, max_size=3))
def test_any_text_argument_survives_ms_swifts_rendering(format: Format, contents: list[str]) -> None:
    check([ToolCall(name="write_file", arguments={"path": "a", "content": text}) for text in contents], format)
