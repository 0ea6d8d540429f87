"""Environment of every child in the train environment, as a table: variable, value, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from configs.load import ROOT
from configs.profile import Profile

Kind = Literal["sft", "grpo", "infer", "deploy", "encode"]


class Variable(NamedTuple):
    name: str
    value: Callable[[Profile, Kind], str | None]
    """None leaves it as it is."""
    why: str


def _cpu(profile: Profile, value: str) -> str | None:
    return value if profile.on_cpu else None


def _threads(profile: Profile) -> str:
    return f"0-{profile.hardware.omp_threads * profile.hardware.nproc - 1}"


# fmt: off
# One variable a line: a table is read down its columns.
VARIABLES: Final[list[Variable]] = [
    Variable("PYTHONUNBUFFERED", lambda p, k: "1", "the log shows the line before a crash"),
    Variable("TOKENIZERS_PARALLELISM", lambda p, k: "false", "a forked tokenizer warns and may hang"),
    Variable("OMP_NUM_THREADS", lambda p, k: str(p.hardware.omp_threads), "two processes with two threads each on two cores are many times slower"),
    Variable("HF_HUB_OFFLINE", lambda p, k: "1", "the model is a local folder: asking a hub costs 7 s offline"),
    Variable("TRANSFORMERS_OFFLINE", lambda p, k: "1", "as above"),
    Variable("USE_HF", lambda p, k: "1", "ms-swift would ask ModelScope otherwise, which knows no offline mode"),
    Variable("HF_DATASETS_CACHE", lambda p, k: str(p.paths.output / ".cache" / "datasets"), "tokenised rows are runtime artifacts"),
    Variable("MODELSCOPE_CACHE", lambda p, k: str(p.paths.output / ".cache" / "modelscope"), "as above"),
    Variable("VLLM_NO_USAGE_STATS", lambda p, k: "1", "nothing about a run is sent anywhere"),
    Variable("DO_NOT_TRACK", lambda p, k: "1", "as above"),
    Variable("CUDA_VISIBLE_DEVICES", lambda p, k: _cpu(p, ""), "a CPU profile stays on CPU beside a card"),
    Variable("DS_ACCELERATOR", lambda p, k: _cpu(p, "cpu"), "deepspeed would look for a card"),
    Variable("VLLM_PLUGINS", lambda p, k: _cpu(p, "agentexecutor"), "training/cpu_lora.py and no other: ms-swift's embedding plugin imports torchvision"),
    Variable("PYTHONPATH", lambda p, k: _cpu(p, str(ROOT / "training" / "plugins")), "vLLM finds that plugin by the entry point there"),
    Variable("VLLM_CPU_KVCACHE_SPACE", lambda p, k: _cpu(p, "1"), "GiB; without it vLLM claims 90% of the memory"),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING", lambda p, k: _cpu(p, "0"), "the engine lives in the process that syncs and patches it"),
    Variable("VLLM_CPU_OMP_THREADS_BIND", lambda p, k: _cpu(p, _threads(p)) if k == "deploy" else None, "the default leaves one of two cores idle"),
]
# fmt: on


def environment(kind: Kind, profile: Profile) -> dict[str, str]:
    """The variables that we set for a child of this kind."""
    values = {variable.name: variable.value(profile, kind) for variable in VARIABLES}
    return {name: value for name, value in values.items() if value is not None}
