"""The real thing: ms-swift serves the smoke model and an adapter, and both act in real sandboxes. Train environment, 60–90 s on two cores."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agents.store import read_episode
from agents.task import load_tasks
from agents.trajectory import Trajectory
from configs.load import ROOT, load_profile
from configs.profile import Profile
from configs.run import Layout, Run
from training.checkpoints import base_shapes
from training.environment import environment
from training.evaluate import evaluate
from training.keeper import descendants
from training.launch import Command
from training.rows import prompt_row

RANK = 4


def random_adapter(base: Path, folder: Path) -> Path:
    """A LoRA that nobody trained, large enough to change what the model says."""
    rng = random.Random(5)
    targets = {
        name.removesuffix(".weight"): shape
        for name, shape in base_shapes(base).items()
        if name.endswith(("q_proj.weight", "v_proj.weight"))
    }
    header: dict[str, Any] = {}
    data = b""
    for name, (rows, columns) in sorted(targets.items()):
        for side, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            raw = struct.pack(f"<{shape[0] * shape[1]}f", *(rng.gauss(0, 0.3) for _ in range(shape[0] * shape[1])))
            key = f"base_model.model.{name}.lora_{side}.weight"
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


def training_ids(profile: Profile, rows: list[dict[str, Any]]) -> list[list[int]]:
    """The prompts' token ids as training makes them, from the train environment."""
    code = (
        "import json, sys; from training.encode import Encoder; m, rows = json.load(sys.stdin); e = Encoder(*m);"
        "print('IDS', json.dumps([e.prompt(row) for row in rows]))"
    )
    model = [str(profile.model_path), profile.model.model_type, profile.model.template, profile.model.agent_template]
    env = Command([], environment("encode", profile)).environment(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(profile.paths.train_python), "-c", code],
        input=json.dumps([model, rows]),
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[list[int]] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("IDS"))[4:])
    return found


@pytest.mark.slow
def test_base_and_adapter_act_on_heldout_tasks_from_the_prompts_that_training_uses(tmp_path: Path) -> None:
    profile = load_profile("smoke", flags={"paths.output": tmp_path / "output"}, environ={})
    subprocess.run(
        [str(ROOT / ".venv-train/bin/python"), "scripts/download_model.py", "--profile", "smoke"], cwd=ROOT, check=True
    )
    adapter = random_adapter(profile.model_path, tmp_path / "sft" / "v0-20260101-000000" / "checkpoint-1")

    result = evaluate(Run(profile, "served"), profile.evaluate.tasks, {"sft": adapter})

    report = json.loads(result.outputs["report"].read_text())
    assert [(p["name"], p["attempts"], p["not_scored"]) for p in report["policies"]] == [("base", 2, 0), ("sft", 2, 0)]
    episodes = [read_episode(path) for path in sorted((Layout(profile).evaluate / "episodes").rglob("*.json"))]
    by_policy = {
        name: sorted((e for e in episodes if e.model == name), key=lambda e: e.task_id) for name in ("base", "sft")
    }
    assert [e.messages[2].content for e in by_policy["base"]] != [e.messages[2].content for e in by_policy["sft"]]
    for episode in episodes:
        assert len(episode.turns) == sum(message.role == "assistant" for message in episode.messages)
        for turn in episode.turns:
            assert turn.token_ids is not None
            assert turn.logprobs is not None
            assert len(turn.token_ids) == len(turn.logprobs)
            assert all(math.isfinite(value) and value <= 0 for value in turn.logprobs)
    assert [first_prompt(e) for e in by_policy["sft"]] == training_ids(profile, rows_of(by_policy["sft"], profile))
    assert not [pid for pid in descendants(1) if "swift.cli.deploy" in cmdline(pid)]


def rows_of(episodes: list[Trajectory], profile: Profile) -> list[dict[str, Any]]:
    tasks = {task.id: task for task in load_tasks(profile.evaluate.tasks)}
    return [prompt_row(tasks[episode.task_id], episode.tools, profile.model) for episode in episodes]


def first_prompt(episode: Trajectory) -> list[int]:
    assert episode.turns[0].prompt_token_ids is not None
    return episode.turns[0].prompt_token_ids


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
