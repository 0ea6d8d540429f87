"""rl-loop: rounds of GRPO on the smoke model, each a step of its own, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_cli import cli
from tests.test_offline_pipeline import smoke_profile
from tests.train_env import provision


@pytest.mark.nightly  # two GRPO rounds, three policy servers: about five minutes
@pytest.mark.timeout(1500)
def test_rounds_go_into_folders_of_their_own_keep_the_best_and_are_reused(tmp_path: Path) -> None:
    provision("smoke")
    profile = str(smoke_profile(tmp_path))
    for command in ("collect", "export", "sft-train"):
        done = cli(command, "--profile", profile, timeout=600)
        assert done.returncode == 0, done.stderr
    words = ("rl-loop", "--profile", profile, "--rounds", "2", "--patience", "2", "--json")
    done = cli(*words, timeout=1200)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)
    assert [entry["round"] for entry in best["history"]] == [0, 1, 2]
    folder = tmp_path / "output" / "smoke-qwen3-1m-agent-grpo"
    assert sorted(path.name for path in folder.glob("round-*")) == ["round-001", "round-002"]
    assert best["pass_rate"] == max(entry["pass_rate"] for entry in best["history"])
    assert json.loads((folder / "best.json").read_text())["round"] == best["round"]
    versions = sorted(folder.glob("round-*/v*"))
    again = cli(*words, timeout=1200)
    assert json.loads(again.stdout)["history"] == best["history"]
    assert sorted(folder.glob("round-*/v*")) == versions
