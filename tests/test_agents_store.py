"""Episodes and trajectories on disk: types survive, and what is damaged or foreign is named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.store import episode_path, load_trajectories, read_episode, write_episode, write_trajectories
from agents.task import ToolCall
from agents.tools import schemas
from agents.trajectory import Message, Outcome, StopReason, Trajectory, Turn, Usage, Verdict
from configs.errors import UserError, WorkFailed

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
DICTS = st.dictionaries(TEXT, JSON, max_size=3)
CALLS = st.builds(ToolCall, name=TEXT, arguments=DICTS, id=TEXT)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["assistant", "tool"]),
    content=TEXT,
    tool_calls=st.lists(CALLS, max_size=2),
    reasoning=TEXT,
)
IDS = st.none() | st.lists(st.integers(0, 200_000), max_size=3)
TURNS = st.builds(
    Turn,
    prompt_token_ids=IDS,
    token_ids=IDS,
    logprobs=st.none() | st.lists(st.floats(-9, 0), max_size=3),
    loss_mask=IDS,
    finish_reason=TEXT,
)


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "task_id": "t",
        "task_digest": "0" * 16,
        "family": "f",
        "agent": "builtin",
        "model": "scripted",
        "attempt": 0,
        "stop_reason": StopReason.FINISHED,
        "outcome": Outcome(verdict=Verdict.PASSED),
    }
    return Trajectory(**{**fields, **changes})


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            trajectory,
            tools=st.lists(DICTS, max_size=2),
            messages=st.lists(MESSAGES, max_size=3),
            turns=st.lists(TURNS, max_size=2),
            usage=st.builds(Usage, cost_usd=st.none() | st.floats(0, 9)),
            timings=st.dictionaries(TEXT, st.floats(0, 9), max_size=2),
            extra=DICTS,
        ),
        max_size=3,
    )
)
def test_behaviour_12_rows_with_different_tools_and_arguments_load_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Trajectory]
) -> None:
    path = tmp_path_factory.mktemp("store") / "trajectories.parquet"
    write_trajectories(path, rows)
    assert load_trajectories(path) == rows


def test_behaviour_12_no_key_of_one_row_leaks_into_another(tmp_path: Path) -> None:
    calls = [
        ToolCall(name="bash", arguments={"command": "ls"}),
        ToolCall(name="write_file", arguments={"path": "a", "content": "1"}),
        ToolCall(name="n", arguments={"command": 1}),
    ]
    rows = [
        trajectory(attempt=n, tools=schemas(["bash"])[: n % 2], messages=[Message(role="assistant", tool_calls=[c])])
        for n, c in enumerate(calls)
    ]
    path = tmp_path / "t.parquet"
    write_trajectories(path, rows)
    loaded = [row.messages[0].tool_calls[0].arguments for row in load_trajectories(path)]
    assert loaded == [{"command": "ls"}, {"path": "a", "content": "1"}, {"command": 1}]


def test_an_episode_file_reads_back_and_its_name_is_safe_and_distinct(tmp_path: Path) -> None:
    for model in ("scripted", "openai/gpt 5", "openai_gpt_5", "../../etc/passwd"):
        written = trajectory(model=model, extra={"well_formed": True})
        path = write_episode(tmp_path, written)
        assert path.parent == tmp_path / ("0" * 16)
        assert read_episode(path) == written
    assert len(list(tmp_path.rglob("*.json"))) == 4
    assert episode_path(tmp_path, "d", "builtin", "scripted", 2) == tmp_path / "d" / "builtin-scripted-2.json"


@pytest.mark.parametrize("damage", ["cut", "foreign", "text"])
def test_behaviour_25_a_truncated_or_foreign_episode_is_named(tmp_path: Path, damage: str) -> None:
    path = write_episode(tmp_path, trajectory())
    whole = path.read_text()
    path.write_text({"cut": whole[: len(whole) // 2], "foreign": '{"name": "someone else"}', "text": "hello"}[damage])
    with pytest.raises(UserError, match=path.name):
        read_episode(path)


@pytest.mark.parametrize("damage", ["cut", "text", "other columns", "missing", "bad row"])
def test_behaviour_25_a_truncated_or_foreign_parquet_is_named(tmp_path: Path, damage: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "trajectories.parquet"
    write_trajectories(path, [trajectory()])
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "text":
        path.write_text("hello")
    elif damage == "other columns":
        pq.write_table(pa.table({"a": [1]}), path)
    elif damage == "bad row":
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index("extra"), "extra", pa.array(["{"])), path)
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"trajectories\.parquet") as caught:
        load_trajectories(path)
    assert "\n" not in str(caught.value)
    if damage == "bad row":
        assert "row 0" in str(caught.value)


def test_behaviour_25_a_folder_that_cannot_be_written_keeps_what_was_there(tmp_path: Path) -> None:
    kept = write_episode(tmp_path, trajectory())
    (tmp_path / ("1" * 16)).write_text("a file where the folder should be")
    with pytest.raises(WorkFailed, match="unchanged"):
        write_episode(tmp_path, trajectory(task_digest="1" * 16))
    assert read_episode(kept) == trajectory()


def test_the_models_errors_cross_a_process() -> None:
    from agents.llm import Failure, LLMError

    error = pickle.loads(pickle.dumps(LLMError(Failure.RATE_LIMITED, "slow down", 2.0)))
    assert (error.reason, error.message, error.retry_after_s) == (Failure.RATE_LIMITED, "slow down", 2.0)
