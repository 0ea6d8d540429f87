"""The infer step: the same queries to the base and to each adapter, greedily, by one child with ms-swift's engine (training/ask.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from configs.errors import UserError, WorkFailed
from configs.files import digest_file, digest_json, read_jsonl, write_jsonl
from configs.manifest import StepResult, run_step
from configs.run import Layout, Run
from training import checkpoints
from training.arguments import BASE_NAME, Job, infer_command
from training.launch import Command
from training.models import check_model
from training.serve import check_names
from training.sft import model_digest
from training.supervise import Finished, run_child

VERSION: Final = 1
RESULT: Final = "inference.jsonl"
QUERIES: Final = "queries.jsonl"
ANSWERS: Final = "answers"
"""Folder of `<policy>.jsonl`, as ms-swift writes them."""
ASKING: Final = "asking "
"""How the child says whose turn it is."""
STALL_S: Final = 1800.0


def infer(run: Run, adapters: dict[str, Path], query: str | None = None, queries: Path | None = None) -> StepResult:
    """Ask the base, then each of `adapters` in its order.

    `query` is one question (None takes the profile's), `queries` a JSONL file of `{"query": …}` or `{"messages": […]}` that goes before it. Output:
    `inference` (inference.jsonl: `{policy, query, messages, response, adapter_digest}`).
    """
    rows = _rows(run, query, queries)
    check_model(run.profile.model_path)
    check_names(adapters)
    for adapter in adapters.values():
        checkpoints.check_adapter(adapter, run.profile.model_path)
    folder = Layout(run.profile).infer
    digests = {BASE_NAME: "", **{name: digest_file(path / checkpoints.WEIGHTS) for name, path in adapters.items()}}
    model = run.profile.model
    inputs = {
        "queries": digest_json(rows),
        "model": model_digest(run.profile.model_path),
        "adapters": digest_json(list(digests.items())),
        "infer": digest_json([model.model_dump(), run.profile.infer.model_dump(), run.profile.on_cpu]),
    }

    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        version = checkpoints.new_version(folder, inputs)
        write_jsonl(version / QUERIES, rows)
        done = _ask(run, adapters, version)
        results: list[dict[str, Any]] = []
        for name, digest in digests.items():
            answers = read_jsonl(version / ANSWERS / f"{name}.jsonl")
            if len(answers) != len(rows):
                raise WorkFailed(
                    f"infer: {name} answered {len(answers)} of {len(rows)} queries; see {run.log('infer')}."
                )
            for row, answer in zip(rows, answers, strict=True):
                text = str(answer["response"])
                said = [*row["messages"], {"role": "assistant", "content": text}]
                results.append(
                    {"policy": name, "query": _asked(row), "messages": said, "response": text, "adapter_digest": digest}
                )
        run.progress("infer", len(digests), len(digests))
        write_jsonl(version / RESULT, results)
        first = {row["policy"]: row["response"] for row in reversed(results)}
        return (
            version,
            {"inference": version / RESULT},
            {
                "query": _asked(rows[0]),
                "queries": len(rows),
                "responses": {n: first[n] for n in digests},
                "peak_memory_gib": round(done.peak_bytes / 2**30, 2),
            },
        )

    return run_step(
        "infer",
        version=VERSION,
        inputs=inputs,
        candidates=lambda: checkpoints.versions(folder),
        make=make,
        force="infer" in run.force,
    )


def command(run: Run, adapters: dict[str, Path], query: str | None = None, queries: Path | None = None) -> Command:
    """What `infer` would start, for --dry-run. Pure; reads `queries` only to refuse a broken file."""
    _rows(run, query, queries)
    return _command(run, adapters, Layout(run.profile).infer / "vN-<timestamp>")


def _command(run: Run, adapters: dict[str, Path], version: Path) -> Command:
    answers = version / ANSWERS / f"{BASE_NAME}.jsonl"
    return infer_command(Job(run.profile, rows=version / QUERIES, output=answers, adapters=adapters))


def _ask(run: Run, adapters: dict[str, Path], version: Path) -> Finished:
    """Let the child answer for every policy. Raises `WorkFailed` with its log's tail, also where one policy's answers are missing."""
    names = [BASE_NAME, *adapters]
    (version / ANSWERS).mkdir()

    def line(text: str) -> None:
        name = text.removeprefix(ASKING)
        if name != text and name in names:
            run.progress("infer", names.index(name), len(names), text)

    def missing() -> str | None:
        files = [version / ANSWERS / f"{name}.jsonl" for name in names]
        return next((f"{file} is missing" for file in files if not file.is_file()), None)

    run.progress("infer", 0, len(names), "loading the engine")
    child = _command(run, adapters, version)
    return run_child(child, run.log("infer"), name="infer", on_line=line, expect=missing, stall_s=STALL_S)


def _rows(run: Run, query: str | None, queries: Path | None) -> list[dict[str, Any]]:
    """Rows of ms-swift: messages that end with the user's."""
    if queries is None:
        return [{"messages": [{"role": "user", "content": query or run.profile.infer.query}]}]
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(read_jsonl(queries), start=1):
        if isinstance(row, dict) and isinstance(row.get("query"), str) and row["query"].strip():
            rows.append({"messages": [{"role": "user", "content": row["query"]}]})
        elif isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
            rows.append({key: row[key] for key in ("messages", "tools") if key in row})
        else:
            raise UserError(
                f'{queries}, row {number}: holds neither "query" (text) nor "messages" (a list); write one of them.'
            )
    if not rows:
        raise UserError(f"{queries}: holds no query.")
    return rows + ([{"messages": [{"role": "user", "content": query}]}] if query else [])


def _asked(row: dict[str, Any]) -> str:
    return next((str(m["content"]) for m in reversed(row["messages"]) if m.get("role") == "user"), "")
