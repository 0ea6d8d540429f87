"""Commands as values: what to start, with which environment, built without torch and printed with keys masked."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from configs.load import ROOT
from configs.profile import Profile

SECRET: Final = re.compile(r"(_KEY|_TOKEN)$|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH_STRING", re.IGNORECASE)
"""Names of environment variables that hold a secret."""

MASK: Final = "***"


@dataclass(frozen=True)
class Command:
    """A child process. `env` is only what we set; `secrets` are names handed through from our own environment, values never stored here."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path = ROOT
    secrets: tuple[str, ...] = ()

    def environment(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The child's whole environment: ours without any secret that is not named in `secrets`, then `env`."""
        ours = os.environ if environ is None else environ
        kept = {name: value for name, value in ours.items() if name in self.secrets or not SECRET.search(name)}
        return {name: value for name, value in kept.items() if name not in TORCHRUN} | self.env


TORCHRUN: Final = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
    | {"MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "NNODES", "NODE_RANK"}
)
"""Left over in a shell, any of these makes a single process believe that it is one of several, or moves the port of another run."""


def torchrun(
    profile: Profile, module: str, flags: Sequence[str], env: Mapping[str, str], *, secrets: tuple[str, ...] = ()
) -> Command:
    """`module` under torch.distributed.run with the profile's processes.

    On one machine `--standalone` lets the launcher bind a free port itself, so that two runs never race for one; `--local_addr` spares it
    looking up a host name that may not resolve.
    """
    hardware = profile.hardware
    if hardware.nnodes > 1:
        where = [
            "--nnodes",
            str(hardware.nnodes),
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            hardware.rendezvous,
            "--rdzv_id",
            profile.name,
        ]
    else:
        where = ["--standalone", "--local_addr", "127.0.0.1"]
    argv = [
        python(profile),
        "-m",
        "torch.distributed.run",
        *where,
        "--nproc_per_node",
        str(hardware.nproc),
        "-m",
        module,
        *flags,
    ]
    return Command(argv, dict(env), secrets=secrets)


def plain(profile: Profile, module: str, flags: Sequence[str], env: Mapping[str, str]) -> Command:
    """`module` as one process in the train environment."""
    return Command([python(profile), "-m", module, *flags], dict(env))


def python(profile: Profile) -> str:
    """The train interpreter."""
    return str(profile.paths.train_python)


def render(command: Command) -> str:
    """The command as a shell would take it: variables first, one flag a line, secrets masked."""
    lines = [
        f"{name}={MASK if SECRET.search(name) else shlex.quote(value)}" for name, value in sorted(command.env.items())
    ]
    lines += [f"{name}={MASK}" for name in sorted(command.secrets)]
    words = [shlex.quote(word) for word in command.argv]
    first = next((i for i, word in enumerate(words) if word.startswith("--") and i > 2), len(words))
    lines.append(" ".join(words[:first]))
    for word in words[first:]:
        if word.startswith("--"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return f"cd {shlex.quote(str(command.cwd))}\n" + " \\\n".join(lines) + "\n"
