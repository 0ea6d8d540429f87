"""Which engine generates: the profile's, or transformers where vLLM is not installed (set-up without --with-vllm)."""

from __future__ import annotations

import dataclasses
import subprocess

from configs.errors import UserError
from configs.profile import Profile
from configs.run import Run


def has_vllm(profile: Profile) -> bool:
    """Whether vLLM is installed in the train environment. Asks its interpreter, without importing anything heavy."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    python = profile.paths.train_python
    if not python.exists():
        raise UserError(
            f"{python}: there is no such interpreter; make it with `python3 scripts/setup_env.py`, or set paths.train_python."
        )
    done = subprocess.run([str(python), "-I", "-c", probe], timeout=60, check=False, capture_output=True)
    return done.returncode == 0


def with_engine(run: Run) -> tuple[Run, str]:
    """The run with the engine that it will really use, and its name: the same path with transformers, only slower."""
    profile = run.profile
    if profile.rollout.engine == "transformers" or not has_vllm(profile):
        rollout = profile.rollout.model_copy(update={"engine": "transformers"})
        return dataclasses.replace(run, profile=profile.model_copy(update={"rollout": rollout})), "transformers"
    return run, "vllm"
