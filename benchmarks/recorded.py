"""What finished output folders say, as one small JSON: every verdict, what it took, and with what. Nothing is run here and no figure is derived."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from configs.errors import UserError
from configs.files import digest_json
from configs.load import load_profile
from configs.manifest import MANIFEST, Manifest, read_manifest
from configs.profile import Profile
from configs.run import Layout
from training.checkpoints import newest_output
from training.results import Row, read_results

POLICIES: Final = ("base", "sft", "grpo")
STARTS: Final = "benchmark.json"
"""Beside a seed's output: one entry for each start of `all` that made something. Without it, wall clock and hardware are unknown."""

PASSED, FAILED, NOT_SCORED = "1", "0", "-"


def recipe(profile: Profile) -> dict[str, Any]:
    """The profile without what differs between seeds and machines: seed, paths, and the folders of the files it names."""
    said: dict[str, Any] = _bare(profile.model_dump(mode="json", exclude={"seed", "paths"}))
    return said


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def digest(profile: Profile) -> str:
    """Sixteen hex digits of `recipe`."""
    return digest_json(recipe(profile))[:16]


def profile_files(folder: Path) -> list[Path]:
    """The profile that the benchmark started, and the one of every run, in a seed's output folder."""
    return [*folder.glob("profile.yaml"), *folder.glob("*/profile.yaml")]


def stored_profile(folder: Path, seed: int) -> Profile:
    """The profile of every run in a seed's output folder. Raises `UserError` where there is none, or runs of another seed or recipe lie there too."""
    profiles = [load_profile(file, environ={}) for file in profile_files(folder)]
    if not profiles:
        raise UserError(f"{folder}: no run of seed {seed} is there.")
    if {(p.seed, digest(p)) for p in profiles} != {(seed, digest(profiles[0]))}:
        raise UserError(
            f"{folder}: holds runs of another profile or seed than {seed}; name an empty --output-dir, or delete it."
        )
    return profiles[0]


def read_seed(folder: Path, seed: int) -> dict[str, Any]:
    """One finished seed, from its newest whole evaluation. Raises `UserError` when it is not finished or not complete."""
    profile = stored_profile(folder, seed)
    layout = Layout(profile.model_copy(update={"paths": profile.paths.model_copy(update={"output": folder})}))
    rows = read_results(newest_output(layout.evaluate, "results"))
    manifests = newest_manifests(folder)
    starts = read_starts(folder)
    peaks = [start["peak_gib"] for start in starts if start["peak_gib"] is not None]
    trained = [m.summary["peak_memory_gib"] for m in manifests.values() if "peak_memory_gib" in m.summary]
    walls = [start["minutes"] for start in starts]
    return {
        "seed": seed,
        "profile": profile.name,
        "profile_digest": digest(profile),
        "recipe": recipe(profile),
        "families": {row.task: row.family for row in sorted(rows, key=lambda r: r.task)},
        "task_digests": {row.task: row.task_digest for row in rows},
        "verdicts": {policy: verdicts(rows, policy, profile.evaluate.attempts) for policy in POLICIES},
        "minutes": {step: round(m.seconds / 60, 1) for step, m in manifests.items()},
        "wall_minutes": round(sum(walls), 1) if walls and None not in walls else None,
        "starts": len(starts),
        "peak_gib": max(peaks, default=None),
        "training_peak_gib": max(trained, default=None),
        "hardware": sorted({start["hardware"] for start in starts}),
        "commits": sorted({start["commit"] for start in starts}),
        "versions": manifests["evaluate"].versions,
    }


def verdicts(rows: Sequence[Row], policy: str, attempts: int) -> list[str]:
    """One string an attempt, one character a task in the order of their ids. Raises `UserError` where an episode is missing."""
    found = {
        (row.task, row.attempt): (PASSED if row.passed else FAILED) if row.scored else NOT_SCORED
        for row in rows
        if row.policy == policy
    }
    tasks = sorted({row.task for row in rows})
    try:
        return ["".join(found[task, attempt] for task in tasks) for attempt in range(attempts)]
    except KeyError as missing:
        raise UserError(f"the evaluation has no episode of policy {policy} for {missing}: run it again.") from None


def newest_manifests(folder: Path) -> dict[str, Manifest]:
    """Step → the newest manifest of it anywhere below a seed's output folder."""
    found = [manifest for file in folder.rglob(MANIFEST) if (manifest := read_manifest(file.parent))]
    return {manifest.step: manifest for manifest in sorted(found, key=lambda m: m.created)}


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Every start recorded so far; one that was killed has no minutes. Raises `UserError` for a damaged file."""
    file = folder / STARTS
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []
    except ValueError as error:
        raise UserError(
            f"{file}: is not JSON ({error}); delete it, and the wall clock of this seed is unknown."
        ) from None


def together(seeds: Sequence[Mapping[str, Any]], missing: Mapping[int, str]) -> dict[str, Any]:
    """All seeds of one profile, what they share said once. Raises `UserError` when they did not run the same recipe on the same tasks."""
    first = seeds[0]
    for key, what in (("profile_digest", "profiles"), ("task_digests", "held-out tasks")):
        others = [str(seed["seed"]) for seed in seeds if seed[key] != first[key]]
        if others:
            raise UserError(
                f"seed {first['seed']} and seed {', '.join(others)} have different {what}: they are no repetition of each other."
            )
    shared = ("profile", "profile_digest", "recipe", "families")
    own = ("seed", "verdicts", "minutes", "wall_minutes", "starts", "peak_gib", "training_peak_gib")
    return {
        **{key: first[key] for key in shared},
        "tasks_digest": digest_json(first["task_digests"])[:16],
        "versions": {name: _all(s["versions"].get(name) for s in seeds) for name in first["versions"]},
        "hardware": sorted({name for seed in seeds for name in seed["hardware"]}),
        "commits": sorted({name for seed in seeds for name in seed["commits"]}),
        "seeds": [{key: seed[key] for key in own} for seed in seeds],
        "missing": {str(seed): why for seed, why in missing.items()},
    }


def _all(values: Any) -> str:
    return " / ".join(sorted({value or "absent" for value in values}))
