"""What the guard of a GRPO training decides (training/guard.py), on real tensors and a real TrainerControl; its probes are given."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerControl, TrainerState

from configs.files import append_lines, write_jsonl
from configs.load import load_profile
from training.guard import Guard, _unless_finished
from training.probe import PROBES, heard

TASKS = 20
PASSED, FAILED = "passed", "failed"


class Given(Guard):
    """Its probes pass so many of TASKS, one after the other."""

    def __init__(self, folder: Path, *passes: int, rows: bool = True) -> None:
        PartialState(cpu=True)
        trainer = SimpleNamespace(
            args=SimpleNamespace(output_dir=str(folder)),
            accelerator=SimpleNamespace(is_main_process=True),
            num_generations=4,
        )
        super().__init__(trainer, load_profile("smoke", environ={}), [{}] * TASKS if rows else [])
        self.given = list(passes)
        self.state, self.control = TrainerState(), TrainerControl()

    def _probe(self, step: int) -> dict[str, Any]:
        passes = self.given.pop(0)
        results = {str(task): task < passes for task in range(TASKS)}
        made = {"step": step, "tasks": TASKS, "scored": TASKS, "passes": passes, "results": results}
        append_lines(self.folder / PROBES, [made])
        return made

    def begin(self, step: int = 0) -> None:
        self.state.global_step = step
        self.on_train_begin(None, self.state, self.control)

    def step(self, *verdicts: str) -> None:
        self.state.global_step += 1
        self.trainer.rollout_verdicts = list(verdicts)
        self.control.should_save = False
        self.on_step_end(None, self.state, self.control)

    def save(self) -> None:
        self.on_save(None, self.state, self.control)


def test_each_saved_checkpoint_is_probed_and_the_best_is_protected(tmp_path: Path) -> None:
    guard = Given(tmp_path, 10, 14, 12)
    guard.begin()
    assert guard.state.best_model_checkpoint is None, "the start is no checkpoint"
    for best in (1, 1):
        guard.step(PASSED, FAILED, PASSED, FAILED)
        guard.save()
        assert guard.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert not guard.control.should_training_stop
    assert guard.given == []


def test_a_resumed_training_probes_what_is_missing_and_repeats_nothing(tmp_path: Path) -> None:
    first = Given(tmp_path, 10, 14)
    first.begin()
    first.step(PASSED, PASSED, FAILED, FAILED)
    first.save()
    again = Given(tmp_path)
    again.begin(1)
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    missing = Given(tmp_path, 15)
    missing.begin(2)
    assert [probe["step"] for probe in missing.probes] == [0, 1, 2]


def test_a_collapse_ends_the_training_and_does_so_again_after_a_resume(tmp_path: Path, capsys: Any) -> None:
    guard = Given(tmp_path, 15, 3)
    guard.begin()
    guard.step(*[FAILED] * 4)
    guard.save()
    assert guard.control.should_training_stop
    said = heard(capsys.readouterr().out)
    assert said is not None
    assert (said["kind"], said["at"]) == ("stop", 1)
    again = Given(tmp_path)
    again.begin(1)
    assert again.control.should_training_stop


def test_a_falling_reward_brings_a_save_forward_once(tmp_path: Path) -> None:
    guard = Given(tmp_path, 10)
    guard.begin()
    wishes = []
    for verdict in [PASSED] * 4 + [FAILED] * 5:
        guard.step(*[verdict] * 8)
        wishes.append(guard.control.should_save)
    assert wishes == [False] * 7 + [True, False]


def test_without_validation_a_falling_reward_is_only_told(tmp_path: Path, capsys: Any) -> None:
    guard = Given(tmp_path, rows=False)
    guard.begin()
    for verdict in [PASSED] * 4 + [FAILED] * 4:
        guard.step(*[verdict] * 8)
        assert not guard.control.should_save
        guard.save()
    said = heard(capsys.readouterr().out)
    assert said is not None
    assert said["kind"] == "warning"
    assert not (tmp_path / PROBES).exists()


def test_what_was_not_scored_and_what_was_seen_already_counts_for_nothing(tmp_path: Path) -> None:
    guard = Given(tmp_path, 10)
    guard.begin()
    gap = "not_scored"
    guard.step(PASSED, FAILED, gap, PASSED, *[gap] * 4)
    guard.on_step_end(None, guard.state, guard.control)  # the same rollouts, trained on twice
    assert guard.steps == [[2 / 3]]


def test_a_resumed_training_knows_the_rewards_of_the_steps_before(tmp_path: Path) -> None:
    verdicts = {1: ["passed", "failed", "not_scored"], 2: ["failed", "failed", "passed"]}
    rows = [
        {"outcome": {"verdict": verdict}, "extra": {"step": step, "group": f"{step}-prompt_0"}}
        for step, some in verdicts.items()
        for verdict in some
    ]
    write_jsonl(tmp_path / "rollouts" / "rank0.jsonl", rows)
    guard = Given(tmp_path, 10)
    guard.begin(2)
    assert guard.steps == [[1 / 2], [1 / 3]]


def test_a_finished_or_stopped_training_trains_no_step_more() -> None:
    epochs: list[int] = []
    run = _unless_finished(lambda trainer, epoch: epochs.append(epoch))
    trainer = SimpleNamespace(control=TrainerControl(), state=TrainerState(global_step=9, max_steps=10))
    run(trainer, 1)
    assert epochs == [1]
    trainer.state.global_step = 10  # resumed from the last checkpoint
    run(trainer, 2)
    assert trainer.control.should_training_stop
    trainer.state.global_step = 5  # resumed after a collapse
    run(trainer, 3)
    assert epochs == [1]


class Sampler(SimpleNamespace):
    """What a probe changes of a trainer, and what it must find again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            args=SimpleNamespace(output_dir=str(folder), max_turns=3, sleep_level=0),
            request_config=SimpleNamespace(temperature=1.0, max_tokens=77),
            multi_turn_scheduler=SimpleNamespace(max_turns=3),
            model=torch.nn.Linear(1, 1),
            use_fast_infer=True,
        )
        self.resets = 0

    def _reset_vllm_cache(self) -> None:
        self.resets += 1


def test_a_probe_samples_as_evaluate_does_and_leaves_the_trainer_and_every_random_state_as_they_were(
    tmp_path: Path,
) -> None:
    trainer, profile = Sampler(tmp_path), load_profile("smoke", environ={})
    guard = Guard(trainer, profile, [{}])
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(3).tolist(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    with contextlib.suppress(ZeroDivisionError), guard._evaluating():
        config = trainer.request_config
        assert (config.temperature, config.max_tokens) == (profile.evaluate.temperature, profile.evaluate.max_tokens)
        assert trainer.args.max_turns == trainer.multi_turn_scheduler.max_turns == profile.collect.max_turns
        torch.rand(100)
        random.random()
        raise ZeroDivisionError
    assert (torch.rand(3).tolist(), random.random()) == expected
    assert trainer.request_config == SimpleNamespace(temperature=1.0, max_tokens=77)
    assert trainer.args.max_turns == trainer.multi_turn_scheduler.max_turns == 3
    with guard._evaluating():
        pass
    assert trainer.resets == 1
