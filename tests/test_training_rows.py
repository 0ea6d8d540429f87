"""Which episodes become rows, and what a row holds: BEHAVIOURS 11, 12 and 14."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.prompts import initial_messages
from agents.store import write_trajectories
from agents.task import Task, ToolCall, Verifier
from agents.tools import schemas
from agents.trajectory import Message, Outcome, StopReason, Trajectory, Verdict
from configs.errors import WorkFailed
from configs.files import read_jsonl, write_jsonl
from configs.load import load_profile
from configs.run import new_run
from training.export import export
from training.rows import Dropped, normalised, prompt_row, select, to_row

MODEL = load_profile("laptop", environ={}).model
TOOLS = schemas(("bash", "write_file"))


def task(name: str = "one", prompt: str = "Create hello.py that prints hi.") -> Task:
    return Task(id=name, prompt=prompt, verifier=Verifier(command="true"))


def call(name: str = "bash", id: str = "call_0", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=id)


def says(text: str = "", *calls: ToolCall, **more: Any) -> Message:
    return Message(role="assistant", content=text, tool_calls=list(calls), **more)


def result(text: str = "exit_code: 0", id: str = "call_0") -> Message:
    return Message(role="tool", content=text, tool_call_id=id, name="bash")


def episode(
    of: Task | None = None,
    *turns: Message,
    verdict: Verdict = Verdict.PASSED,
    stop: StopReason = StopReason.FINISHED,
    attempt: int = 0,
    tools: list[dict[str, Any]] | None = None,
) -> Trajectory:
    of = of or task()
    turns = turns or (says("", call(command="echo hi > hello.py")), result(), says("Done."))
    return Trajectory(
        task_id=of.id,
        task_digest=of.digest,
        family=of.family,
        agent="builtin",
        model="scripted",
        attempt=attempt,
        tools=TOOLS if tools is None else tools,
        messages=[*initial_messages(of), *turns],
        stop_reason=stop,
        outcome=Outcome(verdict=verdict, reason="x" if verdict is not Verdict.PASSED else ""),
    )


def counts(*episodes: Trajectory, heldout: tuple[Task, ...] = ()) -> dict[str, int]:
    found = select(episodes, heldout, MODEL)
    return {"rows": len(found.rows)} | {reason.value: len(names) for reason, names in found.dropped.items() if names}


def test_a_row_holds_the_messages_of_the_episode_in_ms_swifts_roles() -> None:
    row = to_row(episode(), MODEL)
    assert row is not None
    assert [m["role"] for m in row["messages"]] == ["system", "user", "tool_call", "tool_response", "assistant"]
    assert json.loads(row["messages"][2]["content"]) == {"name": "bash", "arguments": {"command": "echo hi > hello.py"}}
    assert json.loads(row["tools"]) == TOOLS
    assert row["task_digest"] == task().digest


def test_parallel_calls_of_one_turn_stay_one_turn_in_their_order() -> None:
    both = says("Two things.", call(command="a", id="call_0"), call(command="b", id="call_1"))
    row = to_row(episode(None, both, result("A"), result("B", "call_1"), says("Done.")), MODEL)
    assert row is not None
    assert [(m["role"], m["content"]) for m in row["messages"][2:]] == [
        ("assistant", "Two things.\n"),
        ("tool_call", '{"name": "bash", "arguments": {"command": "a"}}'),
        ("tool_call", '{"name": "bash", "arguments": {"command": "b"}}'),
        ("tool_response", "A"),
        ("tool_response", "B"),
        ("assistant", "Done."),
    ]


def test_a_policys_turn_keeps_its_raw_text() -> None:
    raw = 'I do it.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    row = to_row(episode(None, says(raw, call(command="ls")), result(), says("Done.")), MODEL)
    assert row is not None
    assert row["messages"][2] == {"role": "assistant", "content": raw}


def test_a_result_after_the_last_call_is_left_out() -> None:
    row = to_row(episode(None, says("", call(command="ls")), result(), stop=StopReason.MAX_TURNS), MODEL)
    assert row is not None
    assert row["messages"][-1]["role"] == "tool_call"


def test_the_prompt_of_a_row_is_the_prompt_of_a_rollout_byte_for_byte() -> None:
    row, start = to_row(episode(), MODEL), prompt_row(task(), TOOLS, MODEL)
    assert row is not None
    assert row["messages"][:2] == start["messages"]
    assert {k: v for k, v in row.items() if k != "messages"} == {k: v for k, v in start.items() if k != "messages"}


def test_the_least_thinking_travels_in_every_row() -> None:
    low = MODEL.model_copy(update={"thinking": "low"})
    row = to_row(episode(None, says("Done.", reasoning="Nothing to do.")), low)
    assert row is not None
    assert (
        row["chat_template_kwargs"]
        == prompt_row(task(), TOOLS, low)["chat_template_kwargs"]
        == {"reasoning_effort": "low"}
    )
    assert row["messages"][-1]["content"] == "<think>\nNothing to do.\n</think>\n\nDone."
    plain = to_row(episode(None, says("Done.", reasoning="Nothing to do.")), MODEL)
    assert plain is not None
    assert "chat_template_kwargs" not in plain
    assert plain["messages"][-1]["content"] == "Done."


def test_failed_and_not_scored_episodes_are_dropped_each_under_its_own_count() -> None:
    assert counts(episode(verdict=Verdict.FAILED), episode(task("two"), verdict=Verdict.NOT_SCORED)) == {
        "rows": 0,
        "failed": 1,
        "not_scored": 1,
    }


def test_the_same_work_twice_is_one_row() -> None:
    assert counts(episode(attempt=0), episode(attempt=1)) == {"rows": 1, "duplicate": 1}


def test_nearly_the_same_work_on_the_same_prompt_is_one_row_and_different_work_is_two() -> None:
    long = "python3 -c 'print(1)' && python3 -c 'print(2)' && python3 -c 'print(3)' && echo finished"
    one = episode(None, says("", call(command=long)), result(), says("Done."))
    near = episode(
        None, says("", call(command=long.replace("finished", "Finished "))), result(), says("done."), attempt=1
    )
    other = episode(
        None, says("", call("write_file", path="hello.py", content="print('hi')")), result(), says("Done."), attempt=2
    )
    assert counts(one, near, other) == {"rows": 2, "near_duplicate": 1}


def test_two_tasks_that_differ_in_one_word_are_two_rows() -> None:
    other = task("two", "Create hello.py that prints ho.")
    assert counts(episode(), episode(other, says("", call(command="echo ho > hello.py")), result(), says("Done."))) == {
        "rows": 2
    }


def test_a_held_out_task_never_becomes_a_row_by_digest_or_by_prompt() -> None:
    assert counts(episode(), heldout=(task("renamed"),)) == {"rows": 0, "heldout_overlap": 1}
    reworded = task("two", "create  Hello.py, that prints HI").model_copy(update={"family": "other"})
    assert counts(episode(), heldout=(reworded,)) == {"rows": 0, "heldout_overlap": 1}


def test_work_that_was_judged_both_ways_is_contradictory_and_so_is_a_pass_that_never_ended() -> None:
    assert counts(episode(attempt=0), episode(attempt=1, verdict=Verdict.FAILED)) == {"rows": 0, "contradictory": 2}
    assert counts(episode(stop=StopReason.INFRA_ERROR)) == {"rows": 0, "contradictory": 1}


def test_calls_and_results_that_do_not_pair_up_are_dropped() -> None:
    unread = episode(None, says(""), result("error: broken JSON", ""), says("Done."))
    unanswered = episode(
        task("two"), says("", call(command="a"), call(command="b", id="call_1")), result(), says("Done.")
    )
    swapped = episode(task("three"), says("", call(command="a")), result(id="call_7"), says("Done."))
    assert counts(unread, unanswered, swapped) == {"rows": 0, "broken_calls": 3}


def test_a_pass_without_a_turn_teaches_nothing() -> None:
    empty = episode().model_copy(update={"messages": initial_messages(task())})
    assert counts(empty) == {"rows": 0, "no_work": 1}


def test_every_episode_is_a_row_or_is_counted_once() -> None:
    many = [episode(task(f"t{i}", f"Task {i % 4}"), verdict=list(Verdict)[i % 3], attempt=i) for i in range(12)]
    found = select(many, [task("h", "Task 0")], MODEL)
    assert len(found.rows) + sum(map(len, found.dropped.values())) == len(many)
    assert set(found.dropped) == set(Dropped)


def test_normalising_forgets_case_spaces_and_punctuation_only() -> None:
    assert normalised("Create  A.py,\nnow!") == normalised("create a.py now")
    assert normalised("Create a.py") != normalised("Create b.py")


def test_an_export_of_different_tools_and_arguments_loads_back_with_no_null_and_no_changed_type(tmp_path: Path) -> None:
    import pyarrow.json as pj

    odd = [
        {
            "type": "function",
            "function": {"name": "count", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        }
    ]
    episodes = [
        episode(),
        episode(
            task("two", "Count to 3."),
            says("", call("count", n=3, deep={"a": [1, "x", None]})),
            result(),
            says("Done."),
            tools=odd,
        ),
        episode(task("three", "Say so."), says("So."), tools=[]),
    ]
    run = new_run(load_profile("smoke", environ={}, flags={"paths.output": str(tmp_path / "output")}))
    write_trajectories(tmp_path / "t.parquet", episodes)
    write_jsonl(tmp_path / "heldout.jsonl", [task("h", "Something else.").model_dump(mode="json")])
    out = export(run, tmp_path / "t.parquet", tmp_path / "heldout.jsonl", tmp_path / "sft" / "train.jsonl")
    rows = pj.read_json(out.outputs["rows"]).to_pylist()  # as the datasets library reads it
    assert rows == read_jsonl(out.outputs["rows"])
    assert [json.loads(row["tools"]) for row in rows] == [TOOLS, [], odd]
    assert json.loads(rows[2]["messages"][2]["content"])["arguments"] == {"n": 3, "deep": {"a": [1, "x", None]}}
    assert json.loads((tmp_path / "sft" / "report.json").read_text())["rows"] == 3
    again = export(run, tmp_path / "t.parquet", tmp_path / "heldout.jsonl", tmp_path / "sft" / "train.jsonl")
    assert again.reused


def test_an_export_without_a_single_row_fails_and_says_why(tmp_path: Path) -> None:
    run = new_run(load_profile("smoke", environ={}, flags={"paths.output": str(tmp_path / "output")}))
    write_trajectories(tmp_path / "t.parquet", [episode(verdict=Verdict.FAILED)])
    write_jsonl(tmp_path / "heldout.jsonl", [task("h", "Something else.").model_dump(mode="json")])
    with pytest.raises(WorkFailed, match=r"none of 1 episodes makes a row \(1 failed\)"):
        export(run, tmp_path / "t.parquet", tmp_path / "heldout.jsonl", tmp_path / "train.jsonl")
