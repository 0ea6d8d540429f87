"""What a step's result says in Prefect's UI: markdown made from its summary, nothing computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from configs.manifest import StepResult
from configs.run import Run
from training.times import of_run


def sentence(result: StepResult) -> str:
    """`sft: reused: inputs and outputs are unchanged (41 s when it was made)`."""
    if result.reused:
        return f"{result.step}: reused: {result.why} ({result.seconds:.0f} s when it was made)"
    return f"{result.step}: made in {result.seconds:.0f} s, because {result.why}"


def publish(result: StepResult) -> None:
    """The step's artifact, under one key for all its runs, so that the UI shows its history."""
    create_markdown_artifact(markdown(result), key=result.step, description=sentence(result))
    if "html" in result.outputs:
        link = result.outputs["html"].absolute().as_uri()
        create_link_artifact(link, "the report with its plots", key="report", description=f"{result.step}: {link}")


def publish_all(run: Run, results: Sequence[StepResult], note: str = "") -> None:
    """The pipeline's artifact: every step, where the time went, then the verdicts."""
    create_markdown_artifact(
        overview(results, note, of_run(run, results)),
        key="pipeline",
        description="every step of this run, and the verdicts",
    )


def overview(results: Sequence[StepResult], note: str, times: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    """A table of the steps, one of their times, the summaries of those that count something, and the evaluation's own report."""
    lines = [
        "# Pipeline",
        "",
        *([note, ""] if note else []),
        "| step | | seconds | why | where |",
        "| --- | --- | ---: | --- | --- |",
    ]
    lines += [
        f"| {r.step} | {'reused' if r.reused else 'made'} | {r.seconds:.0f} | {_cell(r.why)} | `{r.folder}` |"
        for r in results
    ]
    header, rows = times
    lines += [
        "",
        "## Where the time went (minutes:seconds)",
        "",
        f"| {' | '.join(header)} |",
        "| --- " * len(header) + "|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for result in results:
        if result.summary:
            lines += ["", markdown(result, level=2)]
    return "\n".join(lines) + "\n"


def markdown(result: StepResult, level: int = 1) -> str:
    """One step: what happened, its summary as a table, its files. An evaluation shows its own report, which holds the verdicts."""
    lines = [f"{'#' * level} {result.step}", "", sentence(result), "", *_table(result.summary)]
    report = result.outputs.get("markdown")
    if report is not None and report.is_file():
        lines += ["", _deeper(report.read_text(encoding="utf-8"), level)]
    lines += [
        "",
        *(f"- {name}: [{path}]({path.as_uri()})" for name, path in result.outputs.items() if path.is_absolute()),
    ]
    return "\n".join(lines)


def _table(summary: Mapping[str, Any]) -> list[str]:
    if not summary:
        return []
    rows = [f"| {_cell(name)} | {_cell(_plain(value))} |" for name, value in summary.items()]
    return ["| | |", "| --- | --- |", *rows]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) for one in value)
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _deeper(text: str, level: int) -> str:
    """The report's headings, below ours."""
    return re.sub(r"^(#+) ", lambda found: "#" * (len(found.group(1)) + level) + " ", text, flags=re.MULTILINE)
