"""A cache hit is proved: Prefect's stored record of a step counts only while the step's manifest and every output are whole.

The key covers *more* than a step's own inputs: the whole profile, the code, the base model and the content of every file handed in. So a miss is
always safe (the step's function asks its manifest and may still reuse), and a hit is never older than the manifest allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.results import get_result_store

from configs.files import digest_file, digest_json
from configs.load import ROOT
from configs.manifest import StepResult, proved, read_manifest
from configs.profile import Profile
from configs.run import Run

KEY_VERSION: Final = 1
"""Raised when the meaning of the key changes."""

OUT: Final = "out"
"""The argument that says where a step writes: its content is no input."""

CODE: Final = ("configs", "sandboxes", "agents", "training")
"""Packages whose code decides a step's result."""


@dataclass
class Proved(CachePolicy):
    """Key: step, code, profile, model and arguments by content. Drops a stored record that its manifest does not prove."""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str | None:
        run: Run = inputs["run"]
        key = step_key(run.profile, inputs["step"], inputs["arguments"])
        store = get_result_store()
        if store.exists(key):
            record = store.read(key).result
            if inputs["step"] in run.force or not whole(record):
                record_path(Path(store.result_storage.basepath), key).unlink(missing_ok=True)  # type: ignore[union-attr]
        return key


def record_path(storage: Path, key: str) -> Path:
    """Where Prefect's local storage keeps the record of a key."""
    return storage / key


def whole(record: Any) -> bool:
    """Whether the manifest in the record's folder proves this very result. `configs.manifest` is the only judge."""
    if not isinstance(record, StepResult):
        return False
    manifest = read_manifest(record.folder)
    if manifest is None:
        return False
    found, _ = proved(record.folder, record.step, manifest.version, manifest.inputs)
    return found is not None and found.digest == record.digest and found.outputs == record.outputs


def step_key(profile: Profile, step: str, arguments: dict[str, Any]) -> str:
    """File name of the step's record."""
    content = {
        "code": code_digest(),
        "profile": profile.model_dump(mode="json"),
        "model": _stamps(profile.model_path),
        "arguments": {name: str(value) if name == OUT else _content(value) for name, value in arguments.items()},
    }
    return f"{step}-v{KEY_VERSION}-{digest_json(content)[:32]}.json"


@cache
def code_digest() -> str:
    """Digest of every file of the packages that decide a result."""
    files = [
        path
        for package in CODE
        for path in sorted((ROOT / package).rglob("*"))
        if path.suffix in (".py", ".json", ".jinja", ".txt")
    ]
    return digest_json([[str(path.relative_to(ROOT)), digest_file(path)] for path in files])


def _content(value: Any) -> Any:
    if isinstance(value, Path):
        if value.is_dir():
            return [
                str(value),
                [[str(p.relative_to(value)), digest_file(p)] for p in sorted(value.rglob("*")) if p.is_file()],
            ]
        return [str(value), digest_file(value) if value.is_file() else "absent"]
    if isinstance(value, dict):
        return {name: _content(one) for name, one in value.items()}
    return value


def _stamps(folder: Path) -> list[Any]:
    """Sizes and times instead of digests: a base model is 54 GB, and a record too many costs only a question to the manifest."""
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(folder.glob("*")) if p.is_file()]
