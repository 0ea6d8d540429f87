"""The guard of a GRPO training, inside the trainer: it probes the validation tasks, keeps the best checkpoint, and ends a training that collapses.

A probe plays every validation task once by the trainer's own sampler, sandboxes and grading, without a training pass: where training begins and after
each saved checkpoint. Weights are right there: ms-swift copies the adapter into the sampler once for each value of `global_step`, and the rollouts of the
next step find it done. Random states are put back, so training goes on as it would have. A training pass rate that falls brings a save and a probe
forward; a probe that is significantly worse than the best one ends the training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Final

from agents.trajectory import Trajectory, Verdict
from configs.errors import UserError
from configs.files import append_lines, read_jsonl
from configs.load import load_profile
from configs.profile import Profile
from training.collapse import collapsed, falling, window
from training.patching import expect, replace
from training.probe import PROBES, VALIDATION_VARIABLE, best, notice, record, share
from training.rollout import PROFILE_VARIABLE, ROLLOUTS
from training.validation import probes

PHASE: Final = "validation"
"""Name of a probe's seconds in training/clock.py."""
MODE: Final = "probe"
"""`extra.mode` of a probe's trajectory."""
LOCAL: Final = 64
"""Local sandboxes that one process holds at once, at about 7 MB each."""


class Guard:
    """Follows one training. Combined with transformers' TrainerCallback where it is registered; every rank comes to the same decisions."""

    def __init__(self, trainer: Any, profile: Profile, rows: Sequence[dict[str, Any]]) -> None:
        self.trainer, self.profile, self.rows = trainer, profile, rows
        self.folder = Path(trainer.args.output_dir)
        self.probes: list[dict[str, Any]] = []
        self.steps: list[list[float]] = []
        """Pass rates of each step's groups."""
        self._seen: Any = None
        self._suspected = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.probes, self.steps = self._shared([probes(self.folder), _groups(self.folder)])
        self._guard(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        verdicts = getattr(self.trainer, "rollout_verdicts", None)  # training/scored.py
        if verdicts is None or verdicts is self._seen:
            return
        self._seen, size = verdicts, self.trainer.num_generations
        self.steps.append(_rates(verdicts[at : at + size] for at in range(0, len(verdicts), size)))
        reason = falling(self.steps[self._suspected :])
        if not reason:
            return
        self._suspected = len(self.steps) - window(self.steps[::-1])  # told once; from here on this level is the start
        self._say("warning", reason + ("; validating now" if self.rows else ""))
        control.should_save = control.should_save or bool(self.rows)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._guard(state, control)

    def _guard(self, state: Any, control: Any) -> None:
        """Probe the weights as they are, keep the best checkpoint from being deleted, and stop where they are worse than they were."""
        if not self.rows:
            return
        step = int(state.global_step)
        if all(probe["step"] != step for probe in self.probes):
            self.probes.append(self._probe(step))
        found = best([probe for probe in self.probes if probe["step"]])  # the start is no checkpoint
        state.best_global_step = found["step"] if found else None
        state.best_model_checkpoint = str(self.folder / f"checkpoint-{found['step']}") if found else None
        reason = collapsed(self.probes)
        if reason:
            self._say("stop", f"training ends after step {step}: {reason}", at=step)
            control.should_training_stop = True

    def _probe(self, step: int) -> dict[str, Any]:
        from accelerate.utils import gather_object

        trainer, began = self.trainer, time.monotonic()
        mine = share(len(self.rows), trainer.accelerator.process_index, trainer.accelerator.num_processes)
        size = at_once(self.profile, trainer.use_fast_infer)
        played: list[tuple[int, dict[str, Any]]] = []
        with self._evaluating(), trainer.multi_turn_scheduler.rollouts.clock.all_as(PHASE):
            for start in range(0, len(mine), size):
                places = mine[start : start + size]
                samples = trainer.to_samples([self.rows[place % len(self.rows)] for place in places])
                samples = trainer._generate_completions(samples)
                played += [(p, s.rollout_infos["trajectory"]) for p, s in zip(places, samples, strict=True)]
        everyone = sorted(
            (item for item in gather_object(played) if item[0] < len(self.rows)), key=lambda item: item[0]
        )
        trajectories = [Trajectory.model_validate(trajectory) for _, trajectory in everyone]
        probe = record(step, trajectories, time.monotonic() - began, self.profile.evaluate.temperature)
        if trainer.accelerator.is_main_process:
            for trajectory in trajectories:
                trajectory.extra |= {"mode": MODE, "step": step}
            append_lines(self.folder / ROLLOUTS / PROBES, [t.model_dump(mode="json") for t in trajectories])
            append_lines(self.folder / PROBES, [probe])
        lost = f", {probe['not_scored']} not scored" if probe["not_scored"] else ""
        said = {key: probe[key] for key in ("passes", "scored", "not_scored", "pass_rate", "seconds") if key in probe}
        self._say("probe", f"probe after step {step}: {probe['passes']} of {probe['scored']}{lost}", at=step, **said)
        return probe

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The sampler as `evaluate` uses it, and every random state of training as it was."""
        import random

        import torch

        trainer, profile = self.trainer, self.profile
        scheduler = trainer.multi_turn_scheduler
        kept = trainer.request_config, trainer.args.max_turns, scheduler.max_turns
        state = random.getstate()
        trainer.request_config = copy(trainer.request_config)
        trainer.request_config.temperature = profile.evaluate.temperature
        trainer.request_config.max_tokens = profile.evaluate.max_tokens
        trainer.args.max_turns = scheduler.max_turns = profile.collect.max_turns
        trainer.model.train()  # as in a step: ms-swift puts it back after generating, and asks no other arguments
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            trainer.request_config, trainer.args.max_turns, scheduler.max_turns = kept
            random.setstate(state)
        if trainer.use_fast_infer and not trainer.args.sleep_level:
            trainer._reset_vllm_cache()  # a cached prefix would change the last bits of the next rollouts; sleeping drops it anyway

    def _shared(self, value: list[Any]) -> list[Any]:
        """The first rank's value on every rank: other machines may not see its files."""
        from accelerate.utils import broadcast_object_list

        return list(broadcast_object_list(value))

    def _say(self, kind: str, note: str, **fields: Any) -> None:
        if self.trainer.accelerator.is_main_process:
            print(notice(kind, note, **fields), flush=True)


def at_once(profile: Profile, queued: bool) -> int:
    """Tasks that one rank plays together: what a training step holds, or more where sandboxes are ours and an engine queues what it cannot take."""
    step = profile.grpo.batch_size * profile.grpo.gradient_accumulation
    return max(step, LOCAL) if queued and profile.sandboxes.backend != "e2b" else step


def validation_probes() -> str:
    """Register a Guard with every GRPO trainer, and compute the entropy metric without a graph; called by training/patches.py."""
    import swift.rlhf_trainers.grpo_trainer as module
    import torch
    from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
    from transformers import TrainerCallback

    trainer = module.GRPOTrainer
    expect(trainer.__init__, "self._prepare_metrics()")
    expect(trainer._compute_loss_and_metrics, "entropies.masked_fill(", "entropy_mask = entropies >= entropy_threshold")
    expect(RolloutTrainerMixin._fast_infer, "self.state.global_step != self._last_loaded_step")
    expect(RolloutTrainerMixin._rollout, "self._get_request_config()")
    expect(RolloutTrainerMixin._get_request_config, "copy(self.request_config)")
    expect(trainer._inner_training_loop, "self._run_epoch(", "if self.control.should_training_stop:")

    def make(original: Any) -> Any:
        def prepare_metrics(self: Any) -> None:
            original(self)
            profile = load_profile(Path(os.environ[PROFILE_VARIABLE]), environ={})
            self.add_callback(type("Guard", (Guard, TrainerCallback), {})(self, profile, _rows(self.template, profile)))

        return prepare_metrics

    replace(
        module, "entropy_from_logits", torch.no_grad()
    )  # a figure and a mask: its graph would hold the logits again
    replace(trainer, "_run_epoch", _unless_finished)
    return replace(trainer, "_prepare_metrics", make)


def _unless_finished(original: Any) -> Any:
    """transformers trains one step more when it resumes from the last checkpoint, or from one whose probe ended the training."""

    def run_epoch(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        original(self, *args, **kwargs)

    return run_epoch


def _rows(template: Any, profile: Profile) -> list[dict[str, Any]]:
    """The validation prompts, checked by the tokenizer as rl-prepare's are. Raises `UserError` for one that cannot be played."""
    from training.encode import Encoder, examine

    path = os.environ.get(VALIDATION_VARIABLE)
    if not path:
        return []
    rows: list[dict[str, Any]] = read_jsonl(Path(path))
    limit = min(profile.model.max_length, profile.rollout.max_model_len) - profile.evaluate.max_tokens
    kept, report = examine(Encoder.of(copy(template)), "rl", rows, limit, [])
    if len(kept) != len(rows):
        named = [name for names in report["named"].values() for name in names]
        raise UserError(
            f"{path}: {len(rows) - len(kept)} validation prompts cannot be used (limit {limit} tokens), first {named[0]}."
        )
    return rows


def _groups(folder: Path) -> list[list[float]]:
    """The pass rates of each group of the steps before a resume, from the rollouts' files."""
    found: dict[int, dict[str, list[str]]] = {}
    for file in sorted((folder / ROLLOUTS).glob("rank*.jsonl")):
        for row in read_jsonl(file):
            step = found.setdefault(int(row["extra"]["step"]), {})
            step.setdefault(row["extra"]["group"], []).append(row["outcome"]["verdict"])
    return [_rates(found[step].values()) for step in sorted(found)]


def _rates(groups: Iterable[Sequence[str]]) -> list[float]:
    """Pass rates of the groups in which something was scored."""
    known = [[verdict for verdict in group if verdict != Verdict.NOT_SCORED] for group in groups]
    return [group.count(Verdict.PASSED) / len(group) for group in known if group]
