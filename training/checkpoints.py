"""Checkpoint folders: which run is the newest, which checkpoint is whole, and whether an adapter belongs to a base. Needs no torch."""

from __future__ import annotations

import json
import re
import struct
import time
import zipfile
from pathlib import Path
from typing import Any, Final

from configs.errors import UserError
from configs.files import write_json
from configs.manifest import broken_output, read_manifest

_VERSION: Final = re.compile(r"v(\d+)-\d{8}-\d{6}")
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)")
INPUTS: Final = "inputs.json"
"""Digests of what a run was started with, written first; a run without a manifest is resumed only when they are equal."""
WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"


def versions(folder: Path) -> list[Path]:
    """The vN-<timestamp> folders below `folder`, newest (highest N) first."""
    found = [
        (int(match.group(1)), path)
        for path in folder.glob("v*-*")
        if (match := _VERSION.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found, key=lambda item: (item[0], item[1].name), reverse=True)]


def new_version(folder: Path, inputs: dict[str, str] | None = None) -> Path:
    """Make the next vN-<YYYYmmdd-HHMMSS> folder; `inputs` are stored in it first."""
    newest = versions(folder)
    number = int(newest[0].name[1:].partition("-")[0]) + 1 if newest else 0
    path = folder / f"v{number}-{time.strftime('%Y%m%d-%H%M%S')}"
    path.mkdir(parents=True)
    if inputs is not None:
        write_json(path / INPUTS, inputs)
    return path


def interrupted(folder: Path, inputs: dict[str, str]) -> Path | None:
    """The newest version when it was started with exactly these inputs and has no manifest; None otherwise. Configurations are never mixed."""
    for path in versions(folder)[:1]:
        try:
            stored = json.loads((path / INPUTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if read_manifest(path) is None and stored == inputs:
            return path
    return None


def checkpoints(run: Path) -> list[Path]:
    """checkpoint-N folders of one run, highest N first, whole or not."""
    found = [
        (int(match.group(1)), path)
        for path in run.glob("checkpoint-*")
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def last_whole(run: Path) -> Path | None:
    """The newest checkpoint that can be trained on from; a save that a crash cut is passed over."""
    return next((path for path in checkpoints(run) if broken(path, resumable=True) is None), None)


def finished(checkpoint: Path) -> bool:
    """Whether it is the one that its training ends with, as the trainer's own state says."""
    state = _json(checkpoint / "trainer_state.json") or {}
    return bool(state.get("max_steps")) and state.get("global_step", 0) >= state["max_steps"]


def newest_adapter(folder: Path) -> Path:
    """The newest adapter below `folder`. Raises `UserError` when there is none."""
    return newest_output(folder, "adapter")


def newest_output(folder: Path, name: str) -> Path:
    """THE rule for "newest" of stand-alone commands: this output of the highest vN whose manifest is whole.

    Raises `UserError` when there is none.
    """
    why = "it holds no finished run"
    for path in versions(folder):
        manifest = read_manifest(path)
        if manifest is None or name not in manifest.roots:
            continue
        damage = broken_output(path, manifest)
        if damage is None:
            return path / manifest.roots[name]
        why = damage
    raise UserError(f"{folder}: no {name} to use ({why}); make one first: {MAKERS.get(name, 'agentexecutor all')}.")


MAKERS: Final = {
    "adapter": "agentexecutor sft-train or rl-train, or name one with --adapter",
    "inference": "agentexecutor infer",
    "report": "agentexecutor evaluate",
}
"""Output → what makes it, for the sentence of a stand-alone command that finds none."""


def broken(checkpoint: Path, *, resumable: bool = False) -> str | None:
    """What is wrong with an adapter checkpoint, in words; None when it is whole. `resumable` also asks for the trainer's state."""
    if not checkpoint.is_dir():
        return f"{checkpoint} is no folder"
    config = _json(checkpoint / CONFIG)
    if config is None:
        return f"{checkpoint / CONFIG} is missing or not JSON"
    try:
        header = safetensors_header(checkpoint / WEIGHTS)
    except ValueError as error:
        return str(error)
    if not any("lora_" in name for name in header):
        return f"{checkpoint / WEIGHTS} holds no LoRA weights"
    if not resumable:
        return None
    state = _json(checkpoint / "trainer_state.json")
    step = int(checkpoint.name.rsplit("-", 1)[-1])
    if state is None or state.get("global_step") != step:
        return f"{checkpoint / 'trainer_state.json'} is missing or of another step"
    saved = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("global_step*/*.pt")]
    cut = [
        path for path in saved if not zipfile.is_zipfile(path)
    ]  # torch.save writes a zip, whose directory is at its end
    if cut:
        return f"{cut[0]} is cut"
    if not [path for path in saved if "optim" in path.name]:
        return f"{checkpoint} has no optimizer state"
    return None


def check_adapter(path: Path, base: Path) -> None:
    """Raises `UserError` when `path` is no whole LoRA adapter, or was made for another base than the model in `base`."""
    damage = broken(path)
    if damage is not None:
        raise UserError(
            f"the adapter {path} cannot be used: {damage}. Delete its vN folder and train again, or name another with --adapter."
        )
    shapes = base_shapes(base)
    adapter = {name: tuple(info["shape"]) for name, info in safetensors_header(path / WEIGHTS).items()}
    known = 0
    for name, shape in adapter.items():
        module, _, side = name.partition(".lora_")
        target = shapes.get(f"{module.removeprefix('base_model.model.')}.weight")
        if target is None or len(target) != 2 or side[:1] not in ("A", "B"):
            continue
        known += 1
        fits = shape[1] == target[1] if side.startswith("A") else shape[0] == target[0]
        if not fits:
            raise UserError(
                f"the adapter {path} was made for another model than {base}: {name} is {list(shape)}, the weight there {list(target)}."
            )
    made_for = Path(str((_json(path / CONFIG) or {}).get("base_model_name_or_path", ""))).name
    # A multimodal class names its weights differently in memory and on disk: then only the base's name can tell.
    if not known and made_for and made_for != base.name:
        raise UserError(f"the adapter {path} was made for {made_for}, not for {base.name}.")
    layers = {int(found) for name in adapter if (found := _layer(name)) is not None}
    have = {int(found) for name in shapes if (found := _layer(name)) is not None}
    if known and layers - have:
        raise UserError(
            f"the adapter {path} was made for another model than {base}: it has {max(layers) + 1} layers, the model {max(have, default=-1) + 1}."
        )


def base_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every weight of a base model, from its safetensors headers. Raises `UserError` for a broken file or none."""
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise UserError(f"{base}: holds no *.safetensors; bring the model with `python scripts/download_model.py`.")
    try:
        return {name: tuple(info["shape"]) for file in files for name, info in safetensors_header(file).items()}
    except ValueError as error:
        raise UserError(f"{error}; bring the model again with `python scripts/download_model.py`.") from None


def safetensors_header(file: Path) -> dict[str, Any]:
    """Name → {dtype, shape, data_offsets}. Raises `ValueError` for a file that is missing, foreign or cut.

    Format: eight bytes of length, JSON, data (https://github.com/huggingface/safetensors#format).
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            if length > min(size, 1 << 28):
                raise ValueError(f"{file} is not a safetensors file")
            header = json.loads(raw.read(length))
    except OSError:
        raise ValueError(f"{file} is missing") from None
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{file} is not a whole safetensors file") from None
    header.pop("__metadata__", None)
    if size != 8 + length + max((info["data_offsets"][1] for info in header.values()), default=0):
        raise ValueError(f"{file} is cut: its header promises another size")
    return dict(header)


def _layer(name: str) -> str | None:
    match = re.search(r"\.layers\.(\d+)\.", name)
    return match.group(1) if match else None


def _json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
