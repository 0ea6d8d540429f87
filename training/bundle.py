"""The demo bundle's schema, and the check of a bundle against it and against itself. The bundle is four files that a reader can follow by hand.

teacher_trajectory.jsonl   one successful teacher episode, whole
sft_train.jsonl            the very row that training took from it
inference.jsonl            what the base and the trained adapters answered to one query
validation_report.json     checkpoints by digest, versions, evaluation and inference in short, and the digests of the other three files
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.trajectory import Trajectory, Verdict
from configs.errors import UserError
from configs.files import digest_file, read_jsonl
from configs.profile import Model
from training.arguments import BASE_NAME
from training.rows import to_row

BUNDLE_VERSION: Final = 1
TRAJECTORY: Final = "teacher_trajectory.jsonl"
ROWS: Final = "sft_train.jsonl"
INFERENCE: Final = "inference.jsonl"
REPORT: Final = "validation_report.json"
FILES: Final = (TRAJECTORY, ROWS, INFERENCE, REPORT)

EXPECTED: Final = {"What is the capital of France?": "Paris"}
"""Query → a word that a right answer holds. What a model answered is reported, whether right or wrong."""

Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
_ABSOLUTE: Final = re.compile(r"(?:^|[\s\"'=:(])(/[\w.@+-]+(?:/[\w.@+-]+)+|[A-Za-z]:\\)")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Answer(Strict):
    """One line of inference.jsonl."""

    policy: str
    query: str
    response: str
    adapter_digest: str | None
    """None for the base."""


class SftRow(Strict):
    tools: str
    messages: list[dict[str, str]]
    task_id: str
    task_digest: str
    chat_template_kwargs: dict[str, str] = {}


class PolicyFigures(Strict):
    name: str
    tasks: int = Field(ge=1)
    attempts: int = Field(ge=0)
    passes: int = Field(ge=0)
    not_scored: int = Field(ge=0)
    rate: float | None
    low: float | None
    high: float | None


class Difference(Strict):
    policy: str
    against: str
    tasks: int
    difference: float | None
    low: float | None
    high: float | None
    better: int
    worse: int
    p_value: float


class Evaluation(Strict):
    headline: str
    settings: dict[str, Any]
    policies: list[PolicyFigures]
    differences: list[Difference]


class Inference(Strict):
    query: str
    expected: str | None
    """The word that a right answer holds; None where the query is not one of ours."""
    answered: dict[str, bool | None]
    """Policy → whether its answer holds that word."""


class Teacher(Strict):
    task_id: str
    task_digest: str
    agent: str
    model: str
    turns: int


class ValidationReport(Strict):
    bundle_version: int
    profile: str
    model: Model
    checkpoints: dict[str, str]
    """Adapter name → digest of its weights."""
    versions: dict[str, str]
    teacher: Teacher
    evaluation: Evaluation
    inference: Inference
    files: dict[str, str]
    """The other files' SHA-256."""


def check_bundle(folder: Path) -> ValidationReport:
    """The bundle's report, once everything holds. Raises `UserError` with the first thing that does not."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder}: no whole demo bundle, {missing[0]} is missing; `python -m agentexecutor create-demo` writes it."
        )
    try:
        text = (folder / REPORT).read_text(encoding="utf-8")
        report = ValidationReport.model_validate_json(text)
        trajectories = [Trajectory.model_validate(row) for row in read_jsonl(folder / TRAJECTORY)]
        raw_rows = read_jsonl(folder / ROWS)
        for row in raw_rows:
            SftRow.model_validate(row)
        answers = [Answer.model_validate(row) for row in read_jsonl(folder / INFERENCE)]
    except (ValidationError, UnicodeDecodeError) as error:
        raise UserError(
            f"{folder}: the demo bundle does not follow its schema ({_first(error)}); `python -m agentexecutor create-demo` writes it."
        ) from None
    for problem in _problems(folder, report, text, trajectories, raw_rows, answers):
        raise UserError(
            f"{folder}: the demo bundle contradicts itself: {problem}; `python -m agentexecutor create-demo` writes it anew."
        )
    return report


def _problems(
    folder: Path,
    report: ValidationReport,
    text: str,
    trajectories: list[Trajectory],
    rows: list[Any],
    answers: list[Answer],
) -> Iterator[str]:
    if report.bundle_version != BUNDLE_VERSION:
        yield f"it is of version {report.bundle_version}, this code knows {BUNDLE_VERSION}"
    if sorted(report.files) != sorted(FILES[:3]):
        yield f"{REPORT} names {', '.join(report.files)}"
    for name, digest in report.files.items():
        if digest_file(folder / name) != digest:
            yield f"{name} is not the file that {REPORT} was written for"
    if len(trajectories) != 1 or len(rows) != 1:
        yield f"{TRAJECTORY} and {ROWS} hold one line each, found {len(trajectories)} and {len(rows)}"
        return
    teacher = trajectories[0]
    if teacher.outcome.verdict is not Verdict.PASSED:
        yield f"the teacher's episode did not pass ({teacher.outcome.verdict})"
    if to_row(teacher, report.model) != rows[0]:
        yield f"{ROWS} is not what export makes of {TRAJECTORY}"
    if (teacher.task_id, teacher.task_digest, teacher.agent, teacher.model) != (
        report.teacher.task_id,
        report.teacher.task_digest,
        report.teacher.agent,
        report.teacher.model,
    ):
        yield f"{REPORT} names another episode"
    yield from _inference_problems(report, answers)
    yield from _evaluation_problems(report)
    leaked = _ABSOLUTE.search(text)
    if leaked:
        yield f"{REPORT} holds the path {leaked.group(1)!r} of some machine"


def _inference_problems(report: ValidationReport, answers: list[Answer]) -> Iterator[str]:
    policies = [answer.policy for answer in answers]
    if policies[:1] != [BASE_NAME] or len(policies) < 2 or len(set(policies)) != len(policies):
        yield f"{INFERENCE} holds the base and at least one adapter, once each, found {', '.join(policies) or 'nothing'}"
    for answer in answers:
        if answer.query != report.inference.query:
            yield f"{INFERENCE} answers {answer.query!r}, {REPORT} says {report.inference.query!r}"
        if answer.adapter_digest != report.checkpoints.get(answer.policy):
            yield f"{INFERENCE} and {REPORT} name different checkpoints of {answer.policy}"
    if report.inference != inference_summary(answers):
        yield f"{REPORT} does not say what {INFERENCE} shows"


def _evaluation_problems(report: ValidationReport) -> Iterator[str]:
    names = [policy.name for policy in report.evaluation.policies]
    if sorted(names) != sorted([BASE_NAME, *report.checkpoints]):  # a JSON object has no order
        yield f"the evaluation is of {', '.join(names)}, the checkpoints are {', '.join(report.checkpoints)}"
    for policy in report.evaluation.policies:
        rate = policy.passes / policy.attempts if policy.attempts else None
        if policy.rate != rate:
            yield f"{policy.name}: {policy.passes} of {policy.attempts} is not {policy.rate}"
        if rate is not None and not (
            policy.low is not None and policy.high is not None and 0 <= policy.low <= rate <= policy.high <= 1
        ):
            yield f"{policy.name}: the interval does not hold the rate"


def inference_summary(answers: list[Answer]) -> Inference:
    """What the answers show, by policy."""
    query = answers[0].query if answers else ""
    expected = EXPECTED.get(query)
    return Inference(
        query=query,
        expected=expected,
        answered={
            answer.policy: None if expected is None else expected.lower() in answer.response.lower()
            for answer in answers
        },
    )


def _first(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return str(error)
    problem = error.errors()[0]
    return f"{error.title}: {'.'.join(str(part) for part in problem['loc']) or 'the line'}: {problem['msg']}"


def as_jsonl(rows: list[Any]) -> str:
    """Rows in the one form that the bundle's files have."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
