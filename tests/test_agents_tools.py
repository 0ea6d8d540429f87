"""Tools: schemas, validation, and results as the model sees them."""

from __future__ import annotations

from typing import Any

import pytest

from agents.task import Limits, ToolCall
from agents.tools import MAX_RESULT_CHARS, run_call, schemas, validate
from configs.errors import UserError
from sandboxes.base import SandboxError, SandboxTimeout
from sandboxes.mock import NEVER, Fault, MockBackend


async def done(
    *calls: tuple[str, dict[str, Any]], backend: MockBackend | None = None, limits: Limits | None = None
) -> list[str]:
    box = await (backend or MockBackend()).create(run_id="t", lifetime_s=60)
    return [
        await run_call(box, ToolCall(name=name, arguments=arguments), limits or Limits()) for name, arguments in calls
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("reboot", {}), "there is no tool 'reboot'; the tools are bash, write_file"),
        (("bash", {}), "argument 'command' is missing"),
        (("bash", {"command": 3}), "argument 'command' must be a string, not int"),
        (("bash", {"command": "ls", "timeout": "3"}), "there is no argument 'timeout'; the arguments are command"),
        (("bash", {"command": "  "}), "argument 'command' is empty"),
        (("bash", {"command": "ls\0"}), "zero byte"),
        (("write_file", {"path": "a", "content": "\ud800"}), "not valid Unicode"),
        (("read_file", {"path": "a"}), "there is no tool 'read_file'"),
    ],
)
def test_behaviour_6_a_wrong_call_gets_one_precise_sentence(call: tuple[str, dict[str, Any]], words: str) -> None:
    sentence = validate(ToolCall(name=call[0], arguments=call[1]), ["bash", "write_file"])
    assert sentence is not None
    assert words in sentence


def test_a_tool_that_does_not_exist_is_refused_in_a_profile() -> None:
    with pytest.raises(UserError, match="no tool 'sh'"):
        schemas(["bash", "sh"])


async def test_every_result_starts_with_the_exit_code() -> None:
    results = await done(
        ("write_file", {"path": "a.txt", "content": "one\ntwo\n"}),
        ("bash", {"command": "cat a.txt"}),
        ("read_file", {"path": "a.txt"}),
        ("edit_file", {"path": "a.txt", "old": "two", "new": "three"}),
        ("bash", {"command": "cat a.txt"}),
        ("bash", {"command": "cat b.txt"}),
        ("read_file", {"path": "b.txt"}),
        ("edit_file", {"path": "a.txt", "old": "e", "new": "x"}),
    )
    assert results == [
        "exit_code: 0",
        "exit_code: 0\none\ntwo",
        "exit_code: 0\none\ntwo",
        "exit_code: 0",
        "exit_code: 0\none\nthree",
        "exit_code: 1\ncat: b.txt: No such file or directory",
        "exit_code: 1\nerror: b.txt: there is no such file",
        "exit_code: 1\nerror: `old` occurs 3 times in a.txt; it must occur exactly once",
    ]


async def test_a_long_result_keeps_its_beginning_and_its_end() -> None:
    text = "a" * 5000 + "z"
    results = await done(("write_file", {"path": "a", "content": text}), ("read_file", {"path": "a"}))
    assert len(results[1]) < MAX_RESULT_CHARS + 100
    assert "[3001 characters left out]" in results[1]
    assert results[1].endswith("z")


async def test_behaviour_4_a_command_that_never_ends_is_the_agents_and_a_file_call_that_never_returns_the_sandboxes() -> (
    None
):
    quick = Limits(command_timeout_s=0.05)
    results = await done(("bash", {"command": "ls"}), backend=MockBackend([Fault("run", 1, NEVER)]), limits=quick)
    assert results == ["exit_code: 124\n\n[stopped after 0.05 s]"]
    with pytest.raises(SandboxTimeout, match="did not answer a write_file call"):
        await done(
            ("write_file", {"path": "a", "content": ""}),
            backend=MockBackend([Fault("write_file", 1, NEVER)]),
            limits=quick,
        )


async def test_a_failure_of_the_sandbox_is_never_shown_as_a_result() -> None:
    with pytest.raises(SandboxError, match="network"):
        await done(("bash", {"command": "ls"}), backend=MockBackend([Fault("run", 1, SandboxError("network"))]))
