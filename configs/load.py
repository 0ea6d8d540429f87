"""Load a profile and lay the environment and the command line over it. Precedence: flag, environment, profile."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from configs.errors import UserError
from configs.profile import Profile

ROOT: Final = Path(__file__).resolve().parents[1]
"""The checkout. Relative paths of a profile are taken from here."""

PROFILES: Final = ROOT / "configs" / "profiles"

DEFAULT_LLM_BASE_URL: Final = "https://api.deepseek.com/v1"


def _whole(text: str) -> int:
    return int(text)


ENVIRONMENT: Final[dict[str, tuple[tuple[str, ...], Callable[[str], Any]]]] = {
    "EPOCHS": (("sft.epochs", "grpo.epochs"), float),
    "SAMPLES_PER_TASK": (("collect.samples_per_task",), _whole),
    "CONCURRENCY": (("collect.concurrency",), _whole),
    "MAX_TURNS": (("collect.max_turns", "grpo.max_turns"), _whole),
    "NPROC_PER_NODE": (("hardware.nproc",), _whole),
    "VLLM_TP": (("rollout.tensor_parallel",), _whole),
    "VLLM_GPU_MEMORY_UTILIZATION": (("rollout.gpu_memory_utilization",), float),
    "VLLM_MAX_MODEL_LEN": (("rollout.max_model_len",), _whole),
    "VLLM_MAX_NUM_SEQS": (("rollout.max_num_seqs",), _whole),
    "LLM_MODEL": (("teacher.llm",), str),
    "LLM_BASE_URL": (("teacher.base_url",), str),
    "OMP_NUM_THREADS": (("hardware.omp_threads",), _whole),
}
"""Variable → the profile keys that it sets, and its type. Keys (LLM_API_KEY, E2B_API_KEY) are never copied into a profile."""


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use: `CUDA_VISIBLE_DEVICES` where set, else what `nvidia-smi -L` lists; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return (
        len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")]) if listed.returncode == 0 else 0
    )


def choose(gpus: int) -> str:
    """The profile for this hardware; a key never chooses it. Raises `UserError` where only the user can know."""
    names = {0: "laptop", 1: "one-gpu", 4: "qwen3.8-27b-4gpu"}
    if gpus not in names:
        raise UserError(
            f"{gpus} NVIDIA GPUs: no profile is made for that many; name one with --profile ({', '.join(shipped())})."
        )
    return names[gpus]


def shipped() -> list[str]:
    """Names of the profiles in configs/profiles/."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_profile(
    name: str | Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Profile:
    """The effective profile.

    `name` is a shipped profile or a YAML file; None lets the hardware choose. `flags` maps dotted keys (`collect.concurrency`) to values; a None
    value means that the flag was not given. Raises `UserError` with file, key, value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    file = _file(str(name) if name is not None else choose(gpu_count()))
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: is not readable YAML ({error}).") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: a profile is a mapping of keys, as in configs/profiles/laptop.yaml.")
    _validate(raw, file)  # the file must be right by itself, so that a mistake in it is not blamed on a flag
    origin: dict[str, str] = {}
    for variable, (keys, convert) in ENVIRONMENT.items():
        text = environ.get(variable)
        if variable == "OMP_NUM_THREADS" and text is not None and text.strip() in ("", "0"):
            text = "1"
        if not text:
            continue
        try:
            value = convert(text)
        except ValueError:
            raise UserError(
                f"{variable}={text!r} in the environment is not {'a number' if convert is float else 'a whole number'}."
            ) from None
        for key in keys:
            _set(raw, key, value)
            origin[key] = f"{variable}={text} in the environment"
        if variable == "EPOCHS":
            _set(raw, "sft.max_steps", None)
            _set(raw, "grpo.max_steps", None)
        if variable == "LLM_MODEL" and text not in ("scripted", "mock") and not environ.get("LLM_BASE_URL"):
            _set(raw, "teacher.base_url", raw["teacher"].get("base_url") or DEFAULT_LLM_BASE_URL)
    if not environ.get("VLLM_TP") and raw["hardware"]["gpus"] and "NPROC_PER_NODE" in environ:
        _set(raw, "rollout.tensor_parallel", min(raw["rollout"].get("tensor_parallel", 1), raw["hardware"]["nproc"]))
    for key, value in (flags or {}).items():
        if value is not None:
            _set(raw, key, value)
            origin[key] = f"the command line ({key} = {value})"
    given = {key for key, value in (flags or {}).items() if value is not None}
    if "collect.tasks" in given and "grpo.tasks" not in given:
        _set(raw, "grpo.tasks", None)
    profile = _validate(raw, file, origin)
    paths = {field: _absolute(getattr(profile.paths, field)) for field in type(profile.paths).model_fields}
    return profile.model_copy(
        update={
            "paths": profile.paths.model_copy(update=paths),
            "collect": profile.collect.model_copy(update={"tasks": _absolute(profile.collect.tasks)}),
            "grpo": profile.grpo.model_copy(
                update={
                    "tasks": profile.grpo.tasks and _absolute(profile.grpo.tasks),
                    "validation": profile.grpo.validation and _absolute(profile.grpo.validation),
                }
            ),
            "evaluate": profile.evaluate.model_copy(update={"tasks": _absolute(profile.evaluate.tasks)}),
        }
    )


def dump_profile(profile: Profile) -> str:
    """The effective profile as YAML, keys in the order of the models."""
    return yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _file(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"{path}: there is no such profile file.")
        return path
    file = PROFILES / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"there is no profile {name!r}: use one of {', '.join(shipped())}, or the path of a YAML file.")
    return file


def _absolute(path: Path) -> Path:
    return path if path.is_absolute() else ROOT / path


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = raw
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value


def _validate(raw: dict[str, Any], file: Path, origin: Mapping[str, str] | None = None) -> Profile:
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        sentences = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            source = (origin or {}).get(key, str(file))
            hidden = (
                problem["type"] in ("missing", "extra_forbidden") or not key
            )  # what stands at a wrong key may be a secret
            value = "" if hidden else f", got {problem['input']!r}"
            where = f"{source}: {key}: " if key else f"{source}: "
            sentences.append(f"{where}{_plain(problem['msg'], problem['type'])}{value}.")
        raise UserError("\n".join(sentences)) from None


def _plain(message: str, kind: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such key; configs/profile.py lists them"
    if kind == "missing":
        return "this key is missing"
    return message.removeprefix("Value error, ").rstrip(".")


def require_keys(profile: Profile, *, teacher: bool, sandboxes: bool, environ: Mapping[str, str] | None = None) -> None:
    """Raises `UserError` naming each key of the environment that this profile needs and lacks. Values are never read further."""
    environ = os.environ if environ is None else environ
    missing = []
    if teacher and profile.teacher.llm not in ("scripted", "mock") and not environ.get("LLM_API_KEY"):
        missing.append(f"LLM_API_KEY (teacher {profile.teacher.llm})")
    if sandboxes and profile.sandboxes.backend == "e2b" and not environ.get("E2B_API_KEY"):
        missing.append("E2B_API_KEY (sandboxes in E2B's cloud)")
    if missing:
        raise UserError(
            f"profile {profile.name} needs {' and '.join(missing)}: export {'it' if len(missing) == 1 else 'them'} and run again."
        )
