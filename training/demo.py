"""The demo step: one whole example of the loop, in four small files, refreshed only when its content changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.store import load_trajectories
from agents.trajectory import Trajectory
from configs.errors import UserError, WorkFailed
from configs.files import digest_file, digest_json, read_jsonl, write_atomic
from configs.load import ROOT
from configs.manifest import StepResult
from configs.profile import Profile
from configs.run import Layout, Run
from training import bundle
from training.bundle import BUNDLE_VERSION, FILES, Answer, Evaluation, Teacher, ValidationReport, as_jsonl, check_bundle
from training.checkpoints import newest_output, versions
from training.launch import SECRET
from training.rows import to_row


def refresh(run: Run, out: Path) -> StepResult:
    """The bundle from the newest results, as `create-demo` makes it; before there are any, the bundle that is there is checked and left as it is.

    Raises `UserError` when neither is there, or when the results are damaged.
    """
    layout = Layout(run.profile)
    if not versions(layout.infer) and not versions(layout.evaluate) and out.is_dir():
        return _result(out, check_bundle(out), time.monotonic(), True, "there are no results yet to refresh it from")
    inference, report = newest_output(layout.infer, "inference"), newest_output(layout.evaluate, "report")
    return demo(run, layout.trajectories, layout.sft_rows, inference, report, out)


def demo(run: Run, trajectories: Path, rows: Path, inference: Path, report: Path, out: Path) -> StepResult:
    """Refresh the bundle in `out` from what the steps made.

    The new bundle is written aside, checked, and takes the old one's place as a whole; files that are not ours stay. Nothing is written when the
    content is the same. Raises `UserError` when the inputs do not belong together and `WorkFailed` when a secret or a path of this machine is in them.
    """
    started = time.monotonic()
    _recover(out)
    contents = _contents(run.profile, trajectories, rows, inference, report)
    same = all(
        (out / name).is_file() and (out / name).read_text(encoding="utf-8") == text for name, text in contents.items()
    )
    if not same:
        _refuse_leaks(contents)
        _replace(out, contents)
    run.event("demo", written=not same, folder=str(out))
    return _result(out, check_bundle(out), started, same, "its content is unchanged" if same else "its content changed")


def _result(out: Path, checked: ValidationReport, started: float, reused: bool, why: str) -> StepResult:
    return StepResult(
        step="demo",
        folder=out,
        outputs={"bundle": out},
        digest=digest_json({name: digest_file(out / name) for name in FILES}),
        summary={
            "task": checked.teacher.task_id,
            "evaluation": checked.evaluation.headline,
            "query": checked.inference.query,
            "answered": {
                policy: {True: "right", False: "wrong", None: "not judged"}[right]
                for policy, right in checked.inference.answered.items()
            },
        },
        reused=reused,
        why=why,
        seconds=round(time.monotonic() - started, 3),
    )


def _contents(profile: Profile, trajectories: Path, rows: Path, inference: Path, report: Path) -> dict[str, str]:
    """File name → text of the whole bundle."""
    teacher, row = _example(load_trajectories(trajectories), read_jsonl(rows), profile, rows)
    figures = _report(report)
    checkpoints: dict[str, str] = figures["adapters"]
    answers = _answers(read_jsonl(inference), checkpoints, inference)
    texts = {
        bundle.TRAJECTORY: as_jsonl([teacher.model_dump(mode="json")]),
        bundle.ROWS: as_jsonl([row]),
        bundle.INFERENCE: as_jsonl([answer.model_dump(mode="json") for answer in answers]),
    }
    said = ValidationReport(
        bundle_version=BUNDLE_VERSION,
        profile=profile.name,
        # A model that is a folder of this machine is called by that folder's name.
        model=profile.model.model_copy(
            update={"id": _without_folder(profile.model.id), "folder": Path(profile.model.folder).name}
        ),
        checkpoints=checkpoints,
        versions=figures["versions"],
        teacher=Teacher(
            task_id=teacher.task_id,
            task_digest=teacher.task_digest,
            agent=teacher.agent,
            model=teacher.model,
            turns=sum(message.role == "assistant" for message in teacher.messages),
        ),
        evaluation=Evaluation.model_validate(_figures(figures)),
        inference=bundle.inference_summary(answers),
        files={name: _sha256(text) for name, text in texts.items()},
    )
    # The order of policies means something, so keys are not sorted.
    texts[bundle.REPORT] = json.dumps(said.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    return texts


def _example(episodes: list[Trajectory], rows: list[Any], profile: Profile, source: Path) -> tuple[Trajectory, Any]:
    """The first training row, and the episode that it was made from, without what changes from run to run."""
    if not rows:
        raise UserError(f"{source}: holds no row; run `python -m agentexecutor export` again.")
    row = rows[0]
    for episode in episodes:
        if episode.task_digest == row.get("task_digest") and to_row(episode, profile.model) == row:
            return episode.model_copy(update={"run_id": "", "timings": {}}), row
    raise UserError(
        f"{source}: its first row was made from none of the trajectories; run `python -m agentexecutor export` again."
    )


def _report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if {"adapters", "versions", "settings", "headline", "policies", "differences"} <= report.keys():
            return dict(report)
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f"{path}: is no evaluation report; run `python -m agentexecutor evaluate` again.")


def _figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that the bundle keeps."""
    return {
        "headline": report["headline"],
        "settings": report["settings"],
        "policies": [{key: policy[key] for key in bundle.PolicyFigures.model_fields} for policy in report["policies"]],
        "differences": [{key: pair[key] for key in bundle.Difference.model_fields} for pair in report["differences"]],
    }


def _answers(rows: list[Any], checkpoints: Mapping[str, str], source: Path) -> list[Answer]:
    """Every policy's answer to the first query. Raises `UserError` when they are of other checkpoints than the evaluation."""
    query = rows[0].get("query") if rows else None
    asked = [row for row in rows if row["query"] == query]
    found = [
        Answer(policy=r["policy"], query=r["query"], response=r["response"], adapter_digest=r["adapter_digest"] or None)
        for r in asked
    ]
    for answer in found:
        if answer.adapter_digest != checkpoints.get(answer.policy):
            raise UserError(
                f"{source}: {answer.policy} there is not the checkpoint that was evaluated; run infer and evaluate on the same one."
            )
    if len(found) < 2:
        raise UserError(
            f"{source}: holds no answer of base and adapter to the same query; run `python -m agentexecutor infer` again."
        )
    return found


def _refuse_leaks(contents: Mapping[str, str], environ: Mapping[str, str] | None = None) -> None:
    """The bundle is published: nothing in it may be a secret of the environment or a path of this checkout or home."""
    environ = os.environ if environ is None else environ
    secrets = {name: value for name, value in environ.items() if SECRET.search(name) and len(value) >= 8}
    for file, text in contents.items():
        for name, value in secrets.items():
            if value in text or json.dumps(value)[1:-1] in text:
                raise WorkFailed(
                    f"the demo bundle was not written: the value of {name} would stand in {file}. The bundle that was there is unchanged."
                )
        for place in {str(ROOT), str(Path.home())} - {"/"}:
            if f"{place}/" in text or f'{place}"' in text:
                raise WorkFailed(
                    f"the demo bundle was not written: the path {place} of this machine would stand in {file}."
                )


def _replace(out: Path, contents: Mapping[str, str]) -> None:
    """Put a new folder in the place of `out`: there is the old bundle, the new one or, for an instant, none, but never a mixture."""
    new, old = _beside(out)
    shutil.rmtree(new, ignore_errors=True)
    for name, text in contents.items():
        write_atomic(new / name, text)
    check_bundle(new)
    try:
        for file in out.iterdir() if out.is_dir() else []:
            if file.name not in FILES:
                (shutil.copytree if file.is_dir() else shutil.copy2)(file, new / file.name)
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        new.rename(out)
    except OSError as error:
        _recover(out)
        raise WorkFailed(f"{out}: the demo bundle cannot be put in place ({error.strerror or error}).") from error
    shutil.rmtree(old, ignore_errors=True)


def _recover(out: Path) -> None:
    """A crash between the two renames leaves the old bundle aside: put it back."""
    _, old = _beside(out)
    if old.is_dir() and not out.exists():
        old.rename(out)


def _beside(out: Path) -> tuple[Path, Path]:
    return out.with_name(f".{out.name}.new"), out.with_name(f".{out.name}.old")


def _without_folder(model_id: str) -> str:
    return Path(model_id).name if model_id.startswith(("/", "~", ".")) else model_id


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
