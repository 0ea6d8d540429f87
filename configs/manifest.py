"""Manifests: the proof that a step's outputs are whole and belong to its inputs.

A step writes `manifest.json` into its folder last. It is reused only when the manifest names the same step, version and inputs and every output is
there with its size and digest. The CLI and Prefect's cache policy both only read it, so deleting any file simply makes its step run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.files import digest_file, digest_json, write_atomic

MANIFEST: Final = "manifest.json"

Step = Literal["collect", "export", "sft", "rl-prepare", "grpo", "evaluate", "infer", "demo"]


class Output(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str
    """Relative to the manifest's folder."""
    size: int
    sha256: str


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    step: Step
    version: int
    inputs: dict[str, str]
    """Name → digest of everything that the result depends on."""
    outputs: dict[str, list[Output]]
    """Name → the files of that output: one file, or all files of a folder."""
    roots: dict[str, str]
    """Name → the output's own path, relative to the folder."""
    summary: dict[str, Any] = {}
    versions: dict[str, str] = {}
    created: str = ""
    seconds: float = 0.0


class StepResult(BaseModel):
    """What a step hands on: exact paths and one digest. Small, typed and JSON, so that it also crosses a deployment."""

    model_config = ConfigDict(extra="forbid")
    step: Step
    folder: Path
    outputs: dict[str, Path]
    digest: str
    """SHA-256 over the digests of all outputs."""
    summary: dict[str, Any] = {}
    reused: bool = False
    why: str = ""
    """Why it ran or was reused, for people."""
    seconds: float = 0.0


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None when there is none or it is not one of ours (then the step runs again)."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def broken_output(folder: Path, manifest: Manifest) -> str | None:
    """The first output that is missing or changed, in words; None when all are whole."""
    for files in manifest.outputs.values():
        for output in files:
            path = folder / output.path
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != output.size or digest_file(path) != output.sha256:
                return f"{path} has changed"
    return None


def proved(folder: Path, step: Step, version: int, inputs: Mapping[str, str]) -> tuple[StepResult | None, str]:
    """The result in `folder` when it is proved to be this step's, and otherwise None; always with the reason in words."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None, "it has not been made yet"
    if manifest.step != step or manifest.version != version:
        return None, "it was made by another version of the step"
    changed = sorted(k for k in inputs.keys() | manifest.inputs.keys() if inputs.get(k) != manifest.inputs.get(k))
    if changed:
        return None, f"{', '.join(changed)} changed"
    broken = broken_output(folder, manifest)
    if broken:
        return None, broken
    return _result(
        folder, manifest, reused=True, why="inputs and outputs are unchanged"
    ), "inputs and outputs are unchanged"


class NotProved(Exception):
    """`run_step` was only asked, and would have had to make its result. The message says why."""


_asking: ContextVar[bool] = ContextVar("asking", default=False)


@contextmanager
def asking() -> Iterator[None]:
    """Inside, `run_step` makes nothing: it returns a proved result, or raises `NotProved`. So an orchestrator asks a step by the step's own rule."""
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def run_step(
    step: Step,
    *,
    version: int,
    inputs: Mapping[str, str],
    candidates: Callable[[], list[Path]],
    make: Callable[[], tuple[Path, dict[str, Path], dict[str, Any]]],
    force: bool = False,
    versions: Mapping[str, str] | None = None,
) -> StepResult:
    """Reuse the step's result where one of the `candidates` folders proves it; otherwise make it and write its manifest last.

    `make` returns the folder, the named outputs (files or folders below it) and a JSON summary.
    """
    why = "it was forced"
    if not force:
        why = "it has not been made yet"
        for folder in candidates():
            found, reason = proved(folder, step, version, inputs)
            if found is not None:
                return found
            why = reason
    if _asking.get():
        raise NotProved(why)
    started = time.monotonic()
    folder, outputs, summary = make()
    manifest = Manifest(
        step=step,
        version=version,
        inputs=dict(inputs),
        outputs={name: [_output(folder, file) for file in _files(path)] for name, path in outputs.items()},
        roots={name: str(path.relative_to(folder)) for name, path in outputs.items()},
        summary=summary,
        versions=dict(versions or {}),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        seconds=round(time.monotonic() - started, 3),
    )
    write_atomic(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    return _result(folder, manifest, reused=False, why=why)


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _output(folder: Path, file: Path) -> Output:
    return Output(path=str(file.relative_to(folder)), size=file.stat().st_size, sha256=digest_file(file))


def _result(folder: Path, manifest: Manifest, *, reused: bool, why: str) -> StepResult:
    return StepResult(
        step=manifest.step,
        folder=folder,
        outputs={name: folder / root for name, root in manifest.roots.items()},
        digest=digest_json({name: [[o.path, o.sha256] for o in files] for name, files in manifest.outputs.items()}),
        summary=manifest.summary,
        reused=reused,
        why=why,
        seconds=manifest.seconds,
    )
