"""Without vLLM in the train environment, generation is by transformers; the choice is made from what is really installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.load import load_profile
from configs.run import Run
from training.arguments import Job, grpo_command
from training.engine import with_engine


def _run(python: str) -> Run:
    return Run(load_profile("smoke", environ={}, flags={"paths.train_python": python}), "engine")


def test_an_environment_without_vllm_generates_by_transformers(tmp_path: Path) -> None:
    run, engine = with_engine(_run(sys.executable))  # the control environment has no vLLM
    assert engine == "transformers"
    job = Job(run.profile, rows=tmp_path / "rows.jsonl", output=tmp_path, adapter=None)
    argv = grpo_command(job, {}).argv
    assert argv[argv.index("--use_vllm") + 1] == "false"
    assert "--vllm_mode" not in argv


def test_the_train_environment_that_set_up_made_keeps_vllm() -> None:
    before = Run(load_profile("smoke", environ={}), "engine")
    assert with_engine(before) == (before, "vllm")


def test_a_missing_train_environment_is_said_with_its_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="setup_env"):
        with_engine(_run(str(tmp_path / "python")))
