"""What ms-swift is told, as tables: flag, value from the profile, and why. Names are ms-swift's own (4.6.0); tests/golden shows each profile's.

A value of None leaves the flag out. `extra` of the profile comes last and replaces a flag of the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from configs.errors import UserError
from configs.load import ROOT
from configs.profile import Profile
from training.environment import environment
from training.launch import Command, plain, torchrun

PLUGINS: Final = ROOT / "training" / "plugins"
CPU_PLUGIN: Final = PLUGINS / "cpu_plugin.py"
GRPO_PLUGIN: Final = PLUGINS / "grpo_plugin.py"
SCHEDULER: Final = "agent_sandbox"
"""Name under which the plugin registers the multi-turn scheduler."""
REWARD: Final = "agent_verifier"
"""Name under which the plugin registers the reward."""
BASE_NAME: Final = "base"
"""Name of the policy without an adapter, wherever policies are named."""

THINKING: Final = {"none": None, "off": False, "low": True}
"""The effort itself travels in the rows (training/rows.py): ms-swift has no flag for it."""

VLLM_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM has room for; an adapter takes the next larger one."""


@dataclass(frozen=True)
class Job:
    """What the tables read: the profile and the paths of this one run."""

    profile: Profile
    rows: Path | None = None
    """JSONL of training rows, or of queries for infer."""
    output: Path | None = None
    """Folder of checkpoints, or the base's result file of infer."""
    adapter: Path | None = None
    """The adapter to go on from (GRPO)."""
    resume: Path | None = None
    """The checkpoint of an interrupted run."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Adapters of a server or of infer, by name."""
    port: int | None = None
    concurrency: int | None = None
    """Requests at once of a server."""


class Flag(NamedTuple):
    name: str
    value: Callable[[Job], Any]
    why: str


# fmt: off
# One flag a line: a table is read down its columns.
MODEL: Final[list[Flag]] = [
    Flag("model", lambda j: j.profile.model_path, "a local folder, so that no hub is asked"),
    Flag("model_type", lambda j: j.profile.model.model_type, "not guessed from a folder's name"),
    Flag("template", lambda j: j.profile.model.template, "one chat template for rows, rollouts and serving (ms-swift #9160)"),
    Flag("agent_template", lambda j: j.profile.model.agent_template, "how tool calls are written; agents/parsing.py reads the same"),
    Flag("enable_thinking", lambda j: THINKING[j.profile.model.thinking], "a thinking model's default effort fills 2,048 tokens"),
    Flag("torch_dtype", lambda j: "float32" if j.profile.on_cpu else "bfloat16", "CPU kernels are float32"),
    Flag("attn_impl", lambda j: "sdpa", "in torch itself: no flash-attn build"),
]

TRAIN: Final[list[Flag]] = [
    Flag("tuner_type", lambda j: "lora", ""),
    Flag("lora_rank", lambda j: j.profile.lora.rank, ""),
    Flag("lora_alpha", lambda j: j.profile.lora.alpha, ""),
    Flag("lora_dropout", lambda j: j.profile.lora.dropout, ""),
    Flag("target_modules", lambda j: j.profile.lora.target_modules, ""),
    Flag("check_model", lambda j: False, "asks ModelScope whether the folder is its newest: 7 s offline, and training/models.py has checked the files"),
    Flag("fp16", lambda j: False if j.profile.on_cpu else None, "float32 alone makes swift set fp16"),
    Flag("bf16", lambda j: not j.profile.on_cpu, ""),
    Flag("gradient_checkpointing", lambda j: not j.profile.on_cpu, "trades time for memory, which small models on CPU do not need"),
    Flag("use_cpu", lambda j: True if j.profile.on_cpu and _world(j) > 1 else None, "without it torchrun starts independent trainings"),
    Flag("ddp_backend", lambda j: "gloo" if j.profile.on_cpu and _world(j) > 1 else None, "the only one on CPU"),
    Flag("ddp_timeout", lambda j: 7200, "seconds; the default of 208 days hides a hung rank, 10 minutes cut long rollouts (ms-swift #10065)"),
    Flag("deepspeed", lambda j: _deepspeed(j), ""),
    Flag("dataset", lambda j: j.rows, ""),
    Flag("split_dataset_ratio", lambda j: 0, "evaluation is a step of its own, on held-out tasks"),
    Flag("dataset_num_proc", lambda j: 1, ""),
    Flag("dataloader_num_workers", lambda j: 0 if j.profile.on_cpu else 1, "a worker process costs a core"),
    Flag("max_length", lambda j: j.profile.model.max_length, ""),
    Flag("seed", lambda j: j.profile.seed, ""),
    Flag("data_seed", lambda j: j.profile.seed, ""),
    Flag("logging_steps", lambda j: 1, "every step is shown, and a NaN is seen at once"),
    Flag("save_strategy", lambda j: "steps", ""),
    Flag("save_total_limit", lambda j: 3, "optimizer states are three times an adapter"),
    Flag("output_dir", lambda j: j.output, ""),
    Flag("add_version", lambda j: False, "the vN-<timestamp> folder is ours, known before the start"),
    Flag("report_to", lambda j: "none", "figures come from the log lines"),
    Flag("resume_from_checkpoint", lambda j: j.resume, ""),
]

SFT: Final[list[Flag]] = [
    Flag("num_train_epochs", lambda j: None if j.profile.sft.max_steps else j.profile.sft.epochs, ""),
    Flag("max_steps", lambda j: j.profile.sft.max_steps, ""),
    Flag("per_device_train_batch_size", lambda j: j.profile.sft.batch_size, ""),
    Flag("gradient_accumulation_steps", lambda j: j.profile.sft.gradient_accumulation, ""),
    Flag("learning_rate", lambda j: j.profile.sft.learning_rate, ""),
    Flag("save_steps", lambda j: j.profile.sft.save_steps, ""),
    Flag("truncation_strategy", lambda j: "delete", "training/encode.py dropped long rows before; a cut one would lose its end"),
    Flag("strict", lambda j: True, "a row that cannot be encoded stops the run instead of going missing"),
    Flag("external_plugins", lambda j: _plugins(j, []), ""),
]

GRPO: Final[list[Flag]] = [
    Flag("rlhf_type", lambda j: "grpo", ""),
    Flag("adapters", lambda j: None if j.resume else j.adapter, "goes on from the SFT adapter"),
    Flag("ref_adapters", lambda j: j.adapter if j.profile.grpo.beta > 0 else None, "the base as reference pulls the tool format away"),
    Flag("beta", lambda j: j.profile.grpo.beta, ""),
    Flag("num_train_epochs", lambda j: None if j.profile.grpo.max_steps else j.profile.grpo.epochs, ""),
    Flag("max_steps", lambda j: j.profile.grpo.max_steps, ""),
    Flag("per_device_train_batch_size", lambda j: j.profile.grpo.batch_size, ""),
    Flag("gradient_accumulation_steps", lambda j: j.profile.grpo.gradient_accumulation, ""),
    Flag("num_generations", lambda j: j.profile.grpo.num_generations, ""),
    Flag("learning_rate", lambda j: j.profile.grpo.learning_rate, ""),
    Flag("lr_scheduler_type", lambda j: "constant", "few steps: a cosine would spend most of them near zero"),
    Flag("warmup_ratio", lambda j: 0, ""),
    Flag("temperature", lambda j: j.profile.grpo.temperature, ""),
    Flag("max_completion_length", lambda j: j.profile.grpo.max_completion_length, "tokens of one turn (completion_length_limit_scope per_round)"),
    Flag("max_turns", lambda j: j.profile.grpo.max_turns, ""),
    Flag("dataset_shuffle", lambda j: False, "rl-prepare put the families in turn, so that each step sees several"),
    Flag("truncation_strategy", lambda j: "delete", "rl-prepare dropped long prompts before; a cut one is another task"),
    Flag("multi_turn_scheduler", lambda j: SCHEDULER, "runs the policy's tool calls in one sandbox per rollout"),
    Flag("reward_funcs", lambda j: REWARD, ""),
    Flag("external_plugins", lambda j: _plugins(j, [GRPO_PLUGIN]), ""),
    Flag("log_completions", lambda j: j.profile.grpo.log_completions, ""),
    Flag("log_entropy", lambda j: True, "of the sampled tokens, in the loss's own pass: shows a policy that always says the same"),
    Flag("log_rollout_offpolicy_metrics", lambda j: True, "trainer against sampler: shows a stale or doubled adapter"),
    Flag("save_steps", lambda j: j.profile.grpo.save_steps, ""),
    Flag("use_vllm", lambda j: j.profile.rollout.engine != "transformers", ""),
    Flag("vllm_mode", lambda j: {"vllm": "colocate", "server": "server", "transformers": None}[j.profile.rollout.engine], ""),
    Flag("vllm_server_host", lambda j: j.profile.rollout.server_host if j.profile.rollout.engine == "server" else None, ""),
    Flag("vllm_server_port", lambda j: j.profile.rollout.server_port if j.profile.rollout.engine == "server" else None, ""),
    Flag("vllm_enable_lora", lambda j: _colocate(j, True), "syncs the adapter alone instead of merged weights"),
    Flag("vllm_tensor_parallel_size", lambda j: _colocate(j, j.profile.rollout.tensor_parallel), ""),
    Flag("vllm_gpu_memory_utilization", lambda j: _colocate(j, _share(j)), "beside the trainer; on CPU VLLM_CPU_KVCACHE_SPACE says it"),
    Flag("vllm_max_model_len", lambda j: _colocate(j, j.profile.rollout.max_model_len), ""),
    Flag("vllm_max_num_seqs", lambda j: _colocate(j, j.profile.rollout.max_num_seqs), ""),
    Flag("vllm_enforce_eager", lambda j: _colocate(j, True) if j.profile.on_cpu else None, "nothing to compile or capture on CPU"),
    Flag("sleep_level", lambda j: _colocate(j, j.profile.rollout.sleep_level), "2 would discard weights that no adapter sync brings back"),
    Flag("offload_model", lambda j: _colocate(j, j.profile.rollout.offload_model or None), ""),
    Flag("offload_optimizer", lambda j: _colocate(j, j.profile.rollout.offload_optimizer or None), ""),
    Flag("move_model_batches", lambda j: _colocate(j, j.profile.rollout.move_model_batches), "bounds the memory of a full weight move"),
]

SERVE_VLLM: Final[list[Flag]] = [
    Flag("vllm_max_lora_rank", lambda j: _vllm(j, next((r for r in VLLM_RANKS if r >= j.profile.lora.rank), j.profile.lora.rank)), ""),
    Flag("vllm_max_model_len", lambda j: _vllm(j, j.profile.rollout.max_model_len), ""),
    Flag("vllm_max_num_seqs", lambda j: _vllm(j, j.concurrency or j.profile.rollout.max_num_seqs), ""),
    Flag("vllm_tensor_parallel_size", lambda j: _vllm(j, j.profile.rollout.tensor_parallel if not j.profile.on_cpu else 1), "one server owns every card"),
    Flag("vllm_gpu_memory_utilization", lambda j: None if j.profile.on_cpu else _vllm(j, 0.85), "no trainer shares the cards with a server"),
    Flag("vllm_enforce_eager", lambda j: _vllm(j, True) if j.profile.on_cpu else None, "nothing to compile or capture on CPU"),
]

INFER: Final[list[Flag]] = [
    Flag("load_args", lambda j: False, "an adapter's args.json would override the profile"),
    Flag("adapters", lambda j: _named(j), "one engine answers for all of them, one after the other (training/ask.py)"),
    Flag("infer_backend", lambda j: j.profile.infer.engine, ""),
    *SERVE_VLLM,
    Flag("vllm_use_async_engine", lambda j: _vllm(j, False), "batches, as `swift infer` makes them; the arguments are a server's, whose default it is"),
    Flag("val_dataset", lambda j: j.rows, ""),
    Flag("result_path", lambda j: j.output, ""),
    Flag("temperature", lambda j: 0, "greedy: the same answer each time"),
    Flag("max_new_tokens", lambda j: j.profile.infer.max_new_tokens, ""),
    Flag("max_batch_size", lambda j: 8, ""),
    Flag("stream", lambda j: False, "rows, not an interactive prompt"),
    Flag("seed", lambda j: j.profile.seed, ""),
]

DEPLOY: Final[list[Flag]] = [
    Flag("load_args", lambda j: False, "an adapter's args.json would override the profile"),
    Flag("adapters", lambda j: _named(j), "chosen by the request's model name"),
    Flag("served_model_name", lambda j: BASE_NAME, ""),
    Flag("infer_backend", lambda j: "transformers" if j.profile.rollout.engine == "transformers" else "vllm", ""),
    *SERVE_VLLM,
    Flag("host", lambda j: "127.0.0.1", "no one else's business"),
    Flag("port", lambda j: j.port, ""),
    Flag("verbose", lambda j: False, "prompts belong in trajectories, not in logs"),
    Flag("log_interval", lambda j: -1, ""),
    Flag("seed", lambda j: j.profile.seed, ""),
]

# fmt: on


def sft_command(job: Job) -> Command:
    """The LoRA SFT of `job.rows` into `job.output`."""
    return torchrun(
        job.profile,
        "swift.cli.sft",
        words([*MODEL, *TRAIN, *SFT], job, job.profile.sft.extra),
        environment("sft", job.profile),
    )


def grpo_command(job: Job, env: Mapping[str, str] | None = None) -> Command:
    """The LoRA GRPO on the prompts of `job.rows`, from `job.adapter`; `env` is what the plugin reads."""
    secrets = ("E2B_API_KEY",) if job.profile.sandboxes.backend == "e2b" else ()  # the rollouts run in its ranks
    flags = words([*MODEL, *TRAIN, *GRPO], job, job.profile.grpo.extra)
    return torchrun(
        job.profile, "swift.cli.rlhf", flags, {**environment("grpo", job.profile), **(env or {})}, secrets=secrets
    )


def infer_command(job: Job) -> Command:
    """Greedy answers to `job.rows`: the base's into `job.output`, those of each of `job.adapters` beside it."""
    return plain(job.profile, "training.ask", words([*MODEL, *INFER], job), environment("infer", job.profile))


def deploy_command(job: Job) -> Command:
    """A server of the base and of `job.adapters` on `job.port`."""
    return plain(job.profile, "swift.cli.deploy", words([*MODEL, *DEPLOY], job), environment("deploy", job.profile))


def words(table: Sequence[Flag], job: Job, extra: Mapping[str, Any] | None = None) -> list[str]:
    """Walk a table into command-line words."""
    extra = {name.removeprefix("--"): value for name, value in (extra or {}).items()}
    values = {flag.name: flag.value(job) for flag in table if flag.name not in extra} | extra
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", *_text(value))]


def _text(value: Any) -> list[str]:
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return [json.dumps(value)] if isinstance(value, dict) else [str(value)]


def _named(job: Job) -> list[str] | None:
    return [f"{name}={path}" for name, path in job.adapters.items()] or None


def _world(job: Job) -> int:
    return job.profile.hardware.nproc * job.profile.hardware.nnodes


def _share(job: Job) -> float | None:
    return None if job.profile.on_cpu else job.profile.rollout.gpu_memory_utilization


def _colocate(job: Job, value: Any) -> Any:
    return value if job.profile.rollout.engine == "vllm" else None


def _vllm(job: Job, value: Any) -> Any:
    """A vLLM flag of a server or of infer, which may each run on transformers instead."""
    engine = job.profile.infer.engine if job.port is None else job.profile.rollout.engine
    return value if engine != "transformers" else None


def _deepspeed(job: Job) -> Path | None:
    name = job.profile.hardware.deepspeed
    if name == "none":
        return None
    file = ROOT / "configs" / "deepspeed" / f"{name}.json"
    if not file.is_file():
        raise UserError(f"hardware.deepspeed: there is no {file}.")
    return file


def _plugins(job: Job, more: list[Path]) -> list[Path] | None:
    return [*([CPU_PLUGIN] if job.profile.on_cpu else []), *more] or None
