"""The fixes of the GRPO path against the real ms-swift and vLLM: one child in the train environment, about 30 s of CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

from configs.load import ROOT, load_profile
from training.environment import environment


@pytest.mark.slow  # 30 s: imports torch, ms-swift and vLLM once
def test_the_fixes_hold_in_the_train_environment() -> None:
    profile = load_profile("smoke", environ={})
    subprocess.run([sys.executable, str(ROOT / "scripts/download_model.py"), "--profile", "smoke"], check=True)
    inside = ROOT / "tests" / "in_train_env"
    done = subprocess.run(
        [
            str(profile.paths.train_python),
            str(inside / "run.py"),
            sysconfig.get_path("purelib"),
            "-q",
            "-p",
            "no:cacheprovider",
            str(inside / "test_grpo_tokens.py"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            **environment("grpo", profile),
            "GRPO_TEST_MODEL": str(profile.model_path),
            "GRPO_TEST_MODEL_TYPE": profile.model.model_type,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
