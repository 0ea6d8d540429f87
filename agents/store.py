"""Trajectories on disk: one JSON file for each finished episode, written atomically, and all of them as one parquet file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from agents.trajectory import Trajectory
from configs.errors import UserError
from configs.files import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa


def episode_path(folder: Path, task_digest: str, agent: str, model: str, attempt: int) -> Path:
    """`<folder>/<task digest>/<agent>-<model>-<attempt>.json`. A model's name is made safe for a file, and stays distinct."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", model)
    if safe != model:
        safe += f"-{hashlib.sha256(model.encode()).hexdigest()[:6]}"
    return folder / task_digest / f"{agent}-{safe}-{attempt}.json"


def write_episode(folder: Path, trajectory: Trajectory) -> Path:
    """Write one finished episode; a crash at any instant leaves the old file or the new one. Raises `WorkFailed`."""
    path = episode_path(folder, trajectory.task_digest, trajectory.agent, trajectory.model, trajectory.attempt)
    write_atomic(path, trajectory.model_dump_json(indent=1) + "\n")
    return path


def read_episode(path: Path) -> Trajectory:
    """Read one episode. Raises `UserError` that names a truncated or foreign file, and `FileNotFoundError`."""
    try:
        return Trajectory.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path}: is truncated or no episode of ours ({where}: {first['msg']}); delete it to collect it again."
        ) from None


def schema() -> pa.Schema:
    """The parquet schema, explicit: what Arrow infers from differing tools and arguments mixes their keys and fills in nulls.

    Tools, arguments and `extra` are therefore JSON strings.
    """
    import pyarrow as pa

    text, ids = pa.string(), pa.list_(pa.int32())
    call = pa.struct([("name", text), ("arguments", text), ("id", text)])
    message = pa.struct(
        [
            ("role", text),
            ("content", text),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", text),
            ("name", text),
            ("reasoning", text),
        ]
    )
    turn = pa.struct(
        [
            ("prompt_token_ids", ids),
            ("token_ids", ids),
            ("logprobs", pa.list_(pa.float64())),
            ("loss_mask", ids),
            ("finish_reason", text),
            ("seconds", pa.float64()),
        ]
    )
    usage = [
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("cost_usd", pa.float64()),
        ("calls", pa.int64()),
    ]
    return pa.schema(
        [
            ("schema_version", pa.int32()),
            ("task_id", text),
            ("task_digest", text),
            ("family", text),
            ("agent", text),
            ("model", text),
            ("attempt", pa.int32()),
            ("tries", pa.int32()),
            ("tools", text),
            ("messages", pa.list_(message)),
            ("turns", pa.list_(turn)),
            ("stop_reason", text),
            ("outcome", pa.struct([("verdict", text), ("reason", text), ("detail", text)])),
            ("usage", pa.struct(usage)),
            ("timings", pa.map_(text, pa.float64())),
            ("run_id", text),
            ("extra", text),
        ]
    )


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write the parquet file atomically. Raises `WorkFailed`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([_row(trajectory) for trajectory in trajectories], schema=schema())
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def load_trajectories(path: Path) -> list[Trajectory]:
    """All trajectories of a parquet file. Raises `UserError` that names a missing, truncated or foreign file, and its row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `agentexecutor collect` makes it.")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: is truncated or no parquet file ({str(error).splitlines()[0]}); delete it and collect again."
        ) from None
    missing = [name for name in schema().names if name not in table.column_names]
    if missing:
        raise UserError(
            f"{path}: is no file of trajectories (column {missing[0]!r} is missing); delete it and collect again."
        )
    found = []
    for number, row in enumerate(table.to_pylist()):
        try:
            found.append(_trajectory(row))
        except (ValidationError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}, row {number}: is no trajectory of ours ({str(error).splitlines()[0]}); delete the file and collect again."
            ) from None
    return found


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row = trajectory.model_dump(mode="json")
    row["tools"], row["extra"] = _dump(row["tools"]), _dump(row["extra"])
    row["timings"] = list(row["timings"].items())
    for message in row["messages"]:
        for call in message["tool_calls"]:
            call["arguments"] = _dump(call["arguments"])
    return row


def _trajectory(row: dict[str, Any]) -> Trajectory:
    row["tools"], row["extra"] = json.loads(row["tools"]), json.loads(row["extra"])
    row["timings"] = dict(row["timings"])
    for message in row["messages"]:
        for call in message["tool_calls"]:
            call["arguments"] = json.loads(call["arguments"])
    return Trajectory.model_validate(row)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
