"""The builtin loop: order, errors, and each way to stop."""

from __future__ import annotations

import itertools

import pytest
from agents_kit import HANGS, Says, call, task, write

from agents.llm import Failure, LLMError, Reply
from agents.loop import LoopResult, run_loop
from agents.task import Limits, Task
from agents.trajectory import Message, StopReason, Usage
from sandboxes.mock import MockBackend, MockSandbox

BAD = '<tool_call>\n{"name": "write_file", "arguments": {"path"\n</tool_call>'


async def looped(llm: Says, which: Task | None = None, **changes: object) -> tuple[LoopResult, MockSandbox]:
    box = await MockBackend().create(run_id="t", lifetime_s=600)
    settings: dict[str, object] = {"max_turns": 6, "max_tokens": 64, **changes}
    return await run_loop(which or task(), box, llm, ["bash", "write_file"], **settings), box  # type: ignore[arg-type]


async def test_calls_run_in_order_and_the_results_answer_them_in_order() -> None:
    llm = Says([write("a.txt", "one\n") + "\n" + call("bash", command="cat a.txt"), "Done."])
    result, _ = await looped(llm)
    assert [m.role for m in result.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [m.content for m in result.messages[3:5]] == ["exit_code: 0", "exit_code: 0\none"]
    assert [m.tool_call_id for m in result.messages[3:5]] == ["call_0", "call_1"]
    assert result.stop_reason is StopReason.FINISHED
    assert result.well_formed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (BAD, "tool call 2: its JSON is broken"),
        (call("reboot"), "there is no tool 'reboot'"),
        (call("write_file", path="b.txt", content=1), "argument 'content' must be a string, not int"),
    ],
)
async def test_behaviour_6_when_one_of_two_calls_is_wrong_nothing_runs_and_the_error_is_shown(
    wrong: str, words: str
) -> None:
    result, box = await looped(Says([write("a.txt") + "\n" + wrong, "Done."]))
    tools = [m.content for m in result.messages if m.role == "tool"]
    assert "/workspace/a.txt" not in box.files
    assert len(tools) == 2
    assert "not run, because another call of the same turn was wrong" in tools[0]
    assert words in tools[1]
    assert not result.well_formed


async def test_behaviour_6_a_duplicate_id_in_one_turn_runs_neither_call() -> None:
    from agents.task import ToolCall

    calls = [ToolCall(name="write_file", arguments={"path": p, "content": ""}, id="same") for p in ("a", "b")]
    result, box = await looped(Says([Reply(Message(role="assistant", tool_calls=calls))]))
    assert not {"/workspace/a", "/workspace/b"} & set(box.files)
    assert "already used by an earlier call" in result.messages[4].content


async def test_behaviour_7_three_unparsable_turns_in_a_row_stop_the_episode() -> None:
    result, _ = await looped(Says([BAD] * 9))
    assert result.stop_reason is StopReason.PARSE_ERROR
    assert sum(m.role == "assistant" for m in result.messages) == 3


async def test_behaviour_7_a_good_turn_between_two_bad_ones_starts_the_count_anew() -> None:
    result, box = await looped(Says([BAD, BAD, write("a.txt"), BAD, BAD, "Done."]))
    assert result.stop_reason is StopReason.FINISHED
    assert "/workspace/a.txt" in box.files
    assert not result.well_formed


async def test_the_last_turn_stops_at_max_turns_and_the_tasks_own_limit_goes_first() -> None:
    result, _ = await looped(Says([call("bash", command="ls")] * 9), max_turns=3)
    assert result.stop_reason is StopReason.MAX_TURNS
    result, _ = await looped(Says([call("bash", command="ls")] * 9), task(limits=Limits(max_turns=2)), max_turns=3)
    assert sum(m.role == "assistant" for m in result.messages) == 2


async def test_a_cut_turn_stops_at_max_tokens_and_runs_nothing() -> None:
    from agents.parsing import parse

    text = write("a.txt")
    cut = Reply(Message(role="assistant", content=text, tool_calls=parse(text, "hermes").calls), finish_reason="length")
    result, box = await looped(Says([cut]))
    assert result.stop_reason is StopReason.MAX_TOKENS
    assert "/workspace/a.txt" not in box.files


async def test_a_context_overflow_is_the_policys_own_end_and_not_a_failure() -> None:
    result, _ = await looped(Says([write("a.txt"), LLMError(Failure.CONTEXT_OVERFLOW, "too long")]))
    assert result.stop_reason is StopReason.MAX_TOKENS


async def test_the_episodes_deadline_is_seen_between_turns() -> None:
    ticks = itertools.count(0, 10)
    llm = Says([call("bash", command="ls")] * 9)
    result, _ = await looped(
        llm, task(limits=Limits(episode_timeout_s=60)), clock=lambda: float(next(ticks)), max_turns=50
    )
    assert result.stop_reason is StopReason.DEADLINE
    assert 1 <= len(llm.seen) < 9


async def test_behaviour_4_a_model_that_never_answers_is_the_providers_failure_at_its_own_deadline() -> None:
    with pytest.raises(LLMError) as caught:
        await looped(Says([HANGS]), turn_timeout_s=0.05)
    assert caught.value.reason is Failure.TIMEOUT


async def test_doing_nothing_is_not_good_form() -> None:
    result, _ = await looped(Says(["Done."]))
    assert result.stop_reason is StopReason.FINISHED
    assert not result.well_formed


async def test_behaviour_24_one_call_of_unknown_price_makes_the_cost_unknown() -> None:
    def priced(cost: float | None, text: str) -> Reply:
        from agents.parsing import parse

        usage = Usage(prompt_tokens=10, completion_tokens=2, cost_usd=cost, calls=1)
        return Reply(Message(role="assistant", content=text, tool_calls=parse(text, "hermes").calls), usage=usage)

    known, _ = await looped(Says([priced(0.5, write("a")), priced(0.25, "Done.")]))
    assert known.usage == Usage(prompt_tokens=20, completion_tokens=4, cost_usd=0.75, calls=2)
    unknown, _ = await looped(Says([priced(0.5, write("a")), priced(None, "Done.")]))
    assert unknown.usage.cost_usd is None
    free, _ = await looped(Says(["Done."]))
    assert free.usage.cost_usd is None
