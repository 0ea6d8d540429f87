"""The application, the options that several commands share, and what every command does with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from configs.manifest import StepResult
    from configs.profile import Profile
    from training.launch import Command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes a quarter of a second, more than the whole rest of `--help`
    context_settings={
        "terminal_width": 130
    },  # a command's sentence is shown whole, and wraps where the screen is narrow
    help="Train coding agents on real sandbox execution: collect → export → sft → grpo → evaluate → infer → demo.",
)

ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Shipped profile or YAML file; default: by the NVIDIA GPUs of this machine."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, for machines; progress goes to stderr as JSON lines.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Run although an unchanged result is there.")]
Backend = Annotated[str | None, typer.Option("--backend", help="Where commands run: local, e2b or mock.")]
Llm = Annotated[
    str | None, typer.Option("--llm", help="Teacher: scripted, mock, or a litellm model name. Overrides LLM_MODEL.")
]
Concurrency = Annotated[int | None, typer.Option("--concurrency", help="Episodes at once. Overrides CONCURRENCY.")]
MaxTurns = Annotated[int | None, typer.Option("--max-turns", help="Turns of an episode. Overrides MAX_TURNS.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of episodes and rows; default: data.")]
OutputDir = Annotated[Path | None, typer.Option("--output-dir", help="Folder of runtime artifacts; default: output.")]
Adapter = Annotated[Path | None, typer.Option("--adapter", help="LoRA checkpoint folder; default: the newest one.")]


def effective(name: str | None, flags: dict[str, Any], *, say: bool = False) -> Profile:
    """The effective profile: paths given on the command line are taken from the current folder, those of a profile from the checkout."""
    from configs.load import choose, gpu_count, load_profile

    if name is None:
        gpus = gpu_count()
        name = choose(gpus)
        if say:
            typer.echo(
                f"profile {name}, because this machine has {gpus or 'no'} NVIDIA GPU{'' if gpus == 1 else 's'}",
                err=True,
            )
    absolute = {key: str(value.absolute()) if isinstance(value, Path) else value for key, value in flags.items()}
    return load_profile(name, flags=absolute)


def show_command(command: Command, as_json: bool) -> None:
    """A command that a dry run prints: whole, with keys masked."""
    from agentexecutor.console import emit
    from training.launch import MASK, SECRET, render

    env = {name: MASK if SECRET.search(name) else value for name, value in command.env.items()}
    emit(
        {"argv": command.argv, "env": env, "cwd": str(command.cwd), "secrets": list(command.secrets)},
        as_json,
        render(command),
    )


def show_result(result: StepResult, as_json: bool) -> None:
    """The end of a single-step command."""
    from agentexecutor.console import show

    show(result, as_json)


def forced(force: bool, step: str) -> frozenset[str]:
    """`--force` of a single-step command, as a run takes it."""
    return frozenset({step} if force else ())
