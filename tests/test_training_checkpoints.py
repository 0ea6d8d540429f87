"""Which run is the newest, which checkpoint is whole, whose adapter it is; and resume, on a real child that stands in for the trainer."""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from configs.errors import UserError, WorkFailed
from configs.files import read_jsonl
from configs.load import load_profile
from configs.manifest import run_step
from configs.run import Run, new_run
from training.checkpoints import broken, check_adapter, interrupted, last_whole, new_version, newest_adapter, versions
from training.launch import Command
from training.trainer import train


def safetensors(file: Path, shapes: dict[str, list[int]]) -> None:
    offset, header = 0, {}
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def base(folder: Path, width: int = 8, layers: int = 2) -> Path:
    folder.mkdir(parents=True)
    safetensors(
        folder / "model.safetensors",
        {f"model.layers.{i}.self_attn.q_proj.weight": [width, width] for i in range(layers)},
    )
    return folder


def checkpoint(run: Path, step: int, width: int = 8, layers: int = 2, name: str = "base") -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    weights = {}
    for layer in range(layers):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights |= {f"{module}.lora_A.weight": [2, width], f"{module}.lora_B.weight": [width, 2]}
    safetensors(folder / "adapter_model.safetensors", weights)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": f"/x/{name}"})
    )
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for part in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        with zipfile.ZipFile(folder / part, "w") as file:
            file.writestr("data", "x" * 100)
    return folder


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def finish(run: Path, adapter: Path) -> None:
    run_step("sft", version=1, inputs={}, candidates=list, make=lambda: (run, {"adapter": adapter}, {}))


def test_versions_count_up_and_the_highest_is_first_also_past_ten(tmp_path: Path) -> None:
    made = [new_version(tmp_path) for _ in range(12)]
    (tmp_path / "v99-not-ours").mkdir()
    (tmp_path / "notes").mkdir()
    assert versions(tmp_path) == made[::-1]
    assert made[-1].name.startswith("v11-")


def test_the_newest_adapter_is_that_of_the_highest_finished_run_that_is_whole(tmp_path: Path) -> None:
    first, second, third = (new_version(tmp_path) for _ in range(3))
    for run in (first, second):
        finish(run, checkpoint(run, 4))
    checkpoint(third, 2)  # never finished
    assert newest_adapter(tmp_path) == second / "checkpoint-4"
    cut(second / "checkpoint-4" / "adapter_model.safetensors")
    assert newest_adapter(tmp_path) == first / "checkpoint-4"
    cut(first / "checkpoint-4" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"no adapter to use \(.*has changed\); make one first"):
        newest_adapter(tmp_path)
    with pytest.raises(UserError, match="no finished run"):
        newest_adapter(tmp_path / "nothing")


def test_training_goes_on_from_the_last_checkpoint_that_was_saved_whole(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        checkpoint(tmp_path, step)
    assert last_whole(tmp_path) == tmp_path / "checkpoint-10"
    cut(tmp_path / "checkpoint-10" / "optimizer.pt")
    assert last_whole(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    assert last_whole(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    assert last_whole(tmp_path) is None
    assert broken(tmp_path / "checkpoint-2") is None  # as an adapter it is still whole


def test_a_run_is_gone_on_with_only_when_nothing_that_matters_changed(tmp_path: Path) -> None:
    run = new_version(tmp_path, {"rows": "a"})
    assert interrupted(tmp_path, {"rows": "a"}) == run
    assert interrupted(tmp_path, {"rows": "b"}) is None
    finish(run, checkpoint(run, 1))
    assert interrupted(tmp_path, {"rows": "a"}) is None


def test_an_adapter_fits_the_base_it_was_made_for(tmp_path: Path) -> None:
    check_adapter(checkpoint(tmp_path, 1), base(tmp_path / "base"))


@pytest.mark.parametrize(
    ("width", "layers", "why"), [(16, 2, "made for another model"), (8, 3, "it has 3 layers, the model 2")]
)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, width: int, layers: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        check_adapter(checkpoint(tmp_path, 1, width, layers), base(tmp_path / "base"))


def test_where_weights_are_named_otherwise_on_disk_the_bases_name_tells(tmp_path: Path) -> None:
    other = tmp_path / "Qwen"
    other.mkdir()
    safetensors(other / "model.safetensors", {"language_model.q.weight": [8, 8]})
    check_adapter(checkpoint(tmp_path, 1, name="Qwen"), other)
    with pytest.raises(UserError, match="was made for base, not for Qwen"):
        check_adapter(checkpoint(tmp_path, 2), other)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "no config", "full model", "no folder"])
def test_a_corrupt_adapter_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    made = checkpoint(tmp_path, 1)
    weights = made / "adapter_model.safetensors"
    if damage == "cut":
        cut(weights)
    elif damage == "text":
        weights.write_text("not weights at all, but long enough to look for a header")
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "no config":
        (made / "adapter_config.json").unlink()
    elif damage == "full model":
        safetensors(weights, {"model.layers.0.weight": [2, 2]})
    else:
        made = tmp_path / "nowhere"
    with pytest.raises(UserError, match=r"cannot be used: .*train again") as caught:
        check_adapter(made, base(tmp_path / "base"))
    assert "\n" not in str(caught.value)


# Stands in for ms-swift: logs and saves as it does, from the step that it is told to go on from.
TRAINER = f"""
import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from pathlib import Path
from tests.test_training_checkpoints import checkpoint
out, start, end, die = Path(sys.argv[1]), *map(int, sys.argv[2:5])
print("[INFO:swift] rank: 0, local_rank: 0, world_size: 1, local_world_size: 1")
for step in range(start + 1, end + 1):
    print({{'loss': str(9 - step), 'global_step/max_steps': f'{{step}}/{{end}}', 'remaining_time': '5s'}}, flush=True)
    if step == die: sys.exit(9)
    if step % 2 == 0: checkpoint(out, step)
"""


def trainer(version: Path, start: int = 0, end: int = 6, die: int = 0) -> Command:
    return Command([sys.executable, "-c", TRAINER, str(version), str(start), str(end), str(die)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return new_run(load_profile("smoke", environ={}, flags={"paths.output": str(tmp_path / "output")}))


def steps(version: Path) -> list[float]:
    return [row["step"] for row in read_jsonl(version / "metrics.jsonl")]


def test_a_training_killed_midway_goes_on_from_its_checkpoint_and_its_metrics_hold_every_step_once(
    tmp_path: Path, run: Run
) -> None:
    version = new_version(tmp_path / "sft", {})
    with pytest.raises(WorkFailed, match="exit code 9"):
        train(run, "sft", trainer(version, die=5), version, None)
    assert steps(version) == [1, 2, 3, 4, 5]
    resume = last_whole(version)
    assert resume == version / "checkpoint-4"
    done = train(run, "sft", trainer(version, start=4), version, resume)
    assert (done.adapter, done.steps) == (version / "checkpoint-6", 6)
    assert steps(version) == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in done.rows] == steps(version)


def test_an_end_without_the_last_steps_checkpoint_is_a_failure(tmp_path: Path, run: Run) -> None:
    version = new_version(tmp_path / "sft", {})
    with pytest.raises(WorkFailed, match="exit code 0, but its last checkpoint is checkpoint-4, not that of step 5"):
        train(run, "sft", trainer(version, end=5), version, None)
    empty = new_version(tmp_path / "sft", {})
    with pytest.raises(WorkFailed, match="exit code 0, but there is no checkpoint"):
        train(run, "sft", trainer(empty, end=1), empty, None)


def test_progress_is_told_with_the_loss_and_the_time_left(tmp_path: Path, run: Run) -> None:
    version = new_version(tmp_path / "sft", {})
    train(run, "sft", trainer(version), version, None)
    events = [event for event in read_jsonl(run.folder / "events.jsonl") if event["kind"] == "progress"]
    assert [(event["done"], event["total"], event["loss"], event["note"]) for event in events][:2] == [
        (1, 6, 8.0, "about 5 s left"),
        (2, 6, 7.0, "about 5 s left"),
    ]


def test_a_listener_may_stop_the_training(tmp_path: Path, run: Run) -> None:
    version = new_version(tmp_path / "grpo", {})

    def refuse(logged: object) -> None:
        raise WorkFailed("the adapter is doubled")

    with pytest.raises(WorkFailed, match="the adapter is doubled"):
        train(run, "grpo", trainer(version), version, None, on_step=refuse)


def test_steps_that_only_the_trainer_wrote_down_before_both_were_killed_are_not_lost(tmp_path: Path, run: Run) -> None:
    version = new_version(tmp_path / "sft", {})
    resume = checkpoint(version, 4)
    theirs = [json.dumps({"loss": 9.0 - step, "global_step/max_steps": f"{step}/6"}) for step in range(1, 6)]
    (version / "logging.jsonl").write_text("\n".join([*theirs, '{"loss": 3.']))
    (version / "metrics.jsonl").write_text('{"step": 1, "loss": 8.5}\n')
    done = train(run, "sft", trainer(version, start=4), version, resume)
    assert [(row["step"], row["loss"]) for row in done.rows] == [(1, 8.5), (2, 7), (3, 6), (4, 5), (5, 4), (6, 3)]
    assert read_jsonl(version / "metrics.jsonl") == done.rows
