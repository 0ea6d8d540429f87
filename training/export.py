"""The export step: verified episodes become SFT rows, everything else is counted under its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from agents.store import load_trajectories
from agents.task import load_tasks
from configs.errors import WorkFailed
from configs.files import digest_file, digest_json, write_json, write_jsonl
from configs.manifest import StepResult, run_step
from configs.run import Run
from training.rows import Export, select

VERSION: Final = 1
REPORT: Final = "report.json"
NAMED: Final = 20
"""Episodes that the report names for each reason; the count is of all."""


def export(run: Run, trajectories: Path, heldout: Path, out: Path) -> StepResult:
    """Write the rows of the passed episodes in `trajectories` to `out`, and report.json beside.

    Raises `UserError` for unreadable files and `WorkFailed` when no episode makes a row.
    """
    model = run.profile.model
    inputs = {
        "trajectories": digest_file(trajectories) if trajectories.is_file() else "",
        "heldout": digest_file(heldout) if heldout.is_file() else "",
        "format": digest_json([model.agent_template, model.thinking]),
    }

    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        reserved = load_tasks(heldout)
        episodes = load_trajectories(trajectories)
        run.progress("export", 0, len(episodes), "reading episodes")
        result = select(episodes, reserved, model)
        report = summary(result, len(episodes))
        write_json(
            out.parent / REPORT, {**report, "examples": {r.value: n[:NAMED] for r, n in result.dropped.items() if n}}
        )
        if not result.rows:
            raise WorkFailed(
                f"export: none of {len(episodes)} episodes makes a row ({_counts(result)}); see {out.parent / REPORT}."
            )
        write_jsonl(out, result.rows)
        run.progress("export", len(episodes), len(episodes), f"{len(result.rows)} rows; dropped: {_counts(result)}")
        return out.parent, {"rows": out, "report": out.parent / REPORT}, report

    return run_step(
        "export",
        version=VERSION,
        inputs=inputs,
        candidates=lambda: [out.parent],
        make=make,
        force="export" in run.force,
    )


def summary(result: Export, episodes: int) -> dict[str, Any]:
    """Small JSON for people: counts of episodes, rows, rows of each family, and dropped episodes by reason (also the zeros)."""
    return {
        "episodes": episodes,
        "rows": len(result.rows),
        "families": dict(sorted(result.families.items())),
        "dropped": {reason.value: len(names) for reason, names in result.dropped.items()},
    }


def _counts(result: Export) -> str:
    return ", ".join(f"{len(names)} {reason.value}" for reason, names in result.dropped.items() if names) or "nothing"
