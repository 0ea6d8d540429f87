"""One row an evaluation episode, and its parquet file with an explicit schema: the figures of a report come from these rows alone."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from agents.trajectory import Trajectory, Verdict
from configs.errors import UserError
from configs.files import write_atomic

PHASES: Final = ("create", "setup", "generate", "tools", "export", "grade")
"""Phases of an episode whose seconds are kept, by their names in Trajectory.timings."""


@dataclass(frozen=True, slots=True)
class Row:
    """One episode. Times are seconds of that episode; episodes run at once, so their sum is more than the clock's."""

    policy: str
    task: str
    task_digest: str
    family: str
    attempt: int
    verdict: str
    """`passed`, `failed` or `not_scored`."""
    reason: str
    stop_reason: str
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    turns: int
    calls: int
    """Tool calls that were well-formed."""
    tries: int
    create: float
    setup: float
    generate: float
    tools: float
    export: float
    grade: float

    @property
    def scored(self) -> bool:
        return self.verdict != Verdict.NOT_SCORED

    @property
    def passed(self) -> bool:
        return self.verdict == Verdict.PASSED


def row_of(policy: str, trajectory: Trajectory) -> Row:
    """The row of one episode by `policy`."""
    answers = [message for message in trajectory.messages if message.role == "assistant"]
    return Row(
        policy=policy,
        task=trajectory.task_id,
        task_digest=trajectory.task_digest,
        family=trajectory.family,
        attempt=trajectory.attempt,
        verdict=trajectory.outcome.verdict.value,
        reason=trajectory.outcome.reason,
        stop_reason=trajectory.stop_reason.value,
        seconds=trajectory.timings.get("total", 0.0),
        prompt_tokens=trajectory.usage.prompt_tokens,
        completion_tokens=trajectory.usage.completion_tokens,
        turns=len(answers),
        calls=sum(len(message.tool_calls) for message in answers),
        tries=trajectory.tries,
        **{phase: trajectory.timings.get(phase, 0.0) for phase in PHASES},
    )


def write_results(path: Path, rows: list[Row]) -> None:
    """Write parquet atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
    schema = pa.schema([pa.field(name, kinds[str(kind)], nullable=False) for name, kind in Row.__annotations__.items()])
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=schema), buffer)
    write_atomic(path, buffer.getvalue())


def read_results(path: Path) -> list[Row]:
    """The rows of such a file. Raises `UserError` when it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [Row(**row) for row in pq.read_table(path).to_pylist()]
    except (OSError, pa.ArrowException, TypeError) as error:
        raise UserError(
            f"{path}: is no evaluation result ({error}); run `python -m agentexecutor evaluate` again."
        ) from None
