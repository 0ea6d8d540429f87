"""Runs a test file inside the train environment, on the real ms-swift."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

from configs.load import ROOT, load_profile
from training.environment import environment

INSIDE = ROOT / "tests" / "in_train_env"


def provision(profile: str) -> None:
    """Bring the profile's model; costs nothing when it is there."""
    subprocess.run([sys.executable, str(ROOT / "scripts/download_model.py"), "--profile", profile], check=True)


def run_inside(file: str) -> str:
    """The output of pytest on `tests/in_train_env/<file>`; fails with it when a test inside fails."""
    profile = load_profile("smoke", environ={})
    python = profile.paths.train_python
    words = [str(python), str(INSIDE / "run.py"), sysconfig.get_path("purelib"), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, str(INSIDE / file)],
        cwd=ROOT,
        env={**os.environ, **environment("encode", profile)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout
