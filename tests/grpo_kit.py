"""What the GRPO runs of the tests start from."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from configs.load import ROOT, load_profile
from configs.run import Layout, Run, new_run
from tests.train_env import provision
from training import grpo


def start(folder: Path, name: str, **flags: Any) -> tuple[Run, Path, Path]:
    """A run that writes below `folder`, its prompts, and an adapter that changes what the model says."""
    provision(name)
    paths = {"paths.output": str(folder / "output"), "paths.data": str(folder / "data")}
    run = new_run(load_profile(name, flags={**paths, **flags}, environ={}))
    profile, adapter = run.profile, folder / "adapter"
    make = [str(ROOT / "tests/in_train_env/make_adapter.py"), str(profile.model_path), str(adapter)]
    subprocess.run([str(profile.paths.train_python), *make], check=True)
    return run, grpo.prepare(run, profile.collect.tasks, Layout(profile).rl_rows).outputs["rows"], adapter
