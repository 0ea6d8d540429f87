"""Tool calls in text: what is written is read back, what is not exactly a call is a precise error, and nothing ever raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.parsing import CLOSE, OPEN, Format, parse, render
from agents.task import ToolCall
from agents.wire import read_calls

FORMATS: list[Format] = ["hermes", "qwen3_5"]
NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


def values(call: ToolCall) -> tuple[str, object]:
    return call.name, call.arguments


@given(
    st.lists(st.builds(ToolCall, name=NAMES, arguments=st.dictionaries(TEXT, JSON, max_size=3)), min_size=1, max_size=4)
)
def test_hermes_calls_are_read_back_as_they_were_written_in_order(calls: list[ToolCall]) -> None:
    parsed = parse("Let me see.\n" + render(calls, "hermes"), "hermes")
    assert parsed.errors == []
    assert [values(call) for call in parsed.calls] == [values(call) for call in calls]
    assert [call.id for call in parsed.calls] == [f"call_{place}" for place in range(len(calls))]
    assert parsed.text_before == "Let me see."


@given(
    st.lists(
        st.builds(
            ToolCall, name=NAMES, arguments=st.dictionaries(NAMES, TEXT.filter(lambda t: "</" not in t), max_size=3)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_qwen_calls_are_read_back_as_they_were_written_in_order(calls: list[ToolCall]) -> None:
    parsed = parse(render(calls, "qwen3_5"), "qwen3_5")
    assert parsed.errors == []
    assert [values(call) for call in parsed.calls] == [values(call) for call in calls]


PIECES = [
    OPEN,
    CLOSE,
    "<function=bash>",
    "<parameter=command>",
    "</parameter>",
    "</function>",
    "<think>",
    "</think>",
    '{"name": "bash", "arguments": ',
    '{"command": "ls"}',
    "}",
    "{",
    '"',
    "\n",
    "[" * 50,
    "NaN",
    "1" * 5000,
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=14), st.sampled_from(FORMATS))
def test_parsing_is_total_and_every_opening_is_accounted_for(pieces: list[str], format: Format) -> None:
    text = "".join(pieces)
    parsed = parse(text, format)
    if OPEN in text and "think>" not in text:
        assert parsed.calls or parsed.errors


def test_endless_nesting_is_an_error_and_not_a_crash() -> None:
    deep = f'{OPEN}{{"name": "bash", "arguments": ' + '{"a":' * 100_000
    assert "nested too deeply" in parse(deep, "hermes").errors[0]


BROKEN = {
    "the JSON ends early": ('{"name": "bash", "arguments": {"command": "ls"', "JSON is broken at character"),
    "the JSON has a stray word": ('{"name": bash}', "JSON is broken at character 9"),
    "a key is there twice": ('{"name": "bash", "name": "rm", "arguments": {}}', "a key is there twice"),
    "not a number": ('{"name": "bash", "arguments": {"n": NaN}}', "NaN is not JSON"),
    "a number beyond a float": ('{"name": "bash", "arguments": {"n": 1e999}}', "1e999 is too large"),
    "a list": ("[1]", "must be one JSON object with the keys name and arguments"),
    "a key is missing": ('{"name": "bash"}', "must be one JSON object with the keys name and arguments"),
    "a key too many": (
        '{"name": "bash", "arguments": {}, "extra": 1}',
        "must be one JSON object with the keys name and arguments",
    ),
    "arguments as text": ('{"name": "bash", "arguments": "ls"}', "arguments an object"),
    "words after the call": ('{"name": "bash", "arguments": {}} ok', "must end with </tool_call> right after"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_behaviour_6_a_broken_hermes_call_gets_a_precise_error_and_its_neighbour_is_still_read(case: str) -> None:
    inside, words = BROKEN[case]
    good = '{"name": "bash", "arguments": {"command": "pwd"}}'
    parsed = parse(f"{OPEN}\n{inside}\n{CLOSE}\n{OPEN}\n{good}\n{CLOSE}", "hermes")
    assert len(parsed.errors) == 1
    assert parsed.errors[0].startswith("tool call 1: ")
    assert words in parsed.errors[0]
    assert [call.arguments for call in parsed.calls] == [{"command": "pwd"}]


def test_an_unclosed_call_and_a_stray_closing_tag_are_errors_and_not_a_final_answer() -> None:
    assert "must end with" in parse(f'{OPEN}{{"name": "bash", "arguments": {{}}}}', "hermes").errors[0]
    assert "without its <tool_call>" in parse(f'{{"name": "bash", "arguments": {{}}}}{CLOSE}', "hermes").errors[0]


def test_an_argument_may_contain_the_tags_themselves() -> None:
    inner = ToolCall(name="write_file", arguments={"path": "a", "content": f"{OPEN}{CLOSE}"})
    assert [values(c) for c in parse(render([inner], "hermes"), "hermes").calls] == [values(inner)]


def test_a_call_inside_the_thinking_is_not_a_call() -> None:
    call = render([ToolCall(name="bash", arguments={"command": "rm -r ."})], "hermes")
    real = render([ToolCall(name="bash", arguments={"command": "ls"})], "hermes")
    for text in (f"<think>\n{call}\n</think>\n{real}", f"maybe {call}\n</think>\n\n{real}"):
        assert [c.arguments for c in parse(text, "hermes").calls] == [{"command": "ls"}]
    assert parse(f"<think>\nI could {call}", "hermes").calls == []


def test_a_turn_without_tags_is_a_final_answer() -> None:
    for format in FORMATS:
        parsed = parse("Paris.", format)
        assert (parsed.calls, parsed.errors, parsed.text_before) == ([], [], "Paris.")


def test_more_calls_than_a_turn_may_hold_are_cut_off_with_an_error() -> None:
    text = render([ToolCall(name="bash", arguments={"command": "ls"})] * 40, "hermes")
    parsed = parse(text, "hermes")
    assert len(parsed.calls) == 16
    assert "more than 16" in parsed.errors[-1]


def test_behaviour_6_a_providers_repeated_id_and_broken_arguments_are_errors_in_their_place() -> None:
    raw = [
        {"id": "a", "function": {"name": "bash", "arguments": '{"command": "ls"}'}},
        {"id": "a", "function": {"name": "bash", "arguments": '{"command": "rm x"}'}},
        {"id": "b", "function": {"name": "bash", "arguments": '{"command": '}},
        {"id": "c", "function": {"name": "bash", "arguments": "[]"}},
    ]
    calls, errors, unread = read_calls(raw)
    assert [call.arguments for call in calls] == [{"command": "ls"}]
    assert [error.split(":")[0] for error in errors] == [f"tool call {n} (bash)" for n in (2, 3, 4)]
    assert "already used" in errors[0]
    assert "broken" in errors[1]
    assert "rm x" in unread  # the model sees what it wrote


@given(st.dictionaries(TEXT, JSON, max_size=3))
def test_a_providers_arguments_keep_their_types(arguments: dict[str, object]) -> None:
    calls, errors, _ = read_calls([{"id": "a", "function": {"name": "f", "arguments": json.dumps(arguments)}}])
    assert (calls[0].arguments, errors) == (arguments, [])
