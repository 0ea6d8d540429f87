"""The table of steps: which plain function each one calls, and whether it wants the GPU pool."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from configs.manifest import Step, StepResult


@dataclass(frozen=True, slots=True)
class Entry:
    function: str
    """`module:function`; imported only when the step really runs, so that a run that reuses everything starts at once."""

    gpu: bool = False
    """A GPU step is a deployment of its own, on the `gpu` pool."""

    manifest: bool = True
    """Whether the function goes through `run_step` and so can be asked without making anything; demo compares content by itself."""


STEPS: Final[Mapping[Step, Entry]] = {
    "collect": Entry("agents.collect:collect"),
    "export": Entry("training.export:export"),
    "sft": Entry("training.sft:sft", gpu=True),
    "rl-prepare": Entry("training.grpo:prepare"),
    "grpo": Entry("training.grpo:grpo", gpu=True),
    "evaluate": Entry("training.evaluate:evaluate", gpu=True),
    "infer": Entry("training.infer:infer", gpu=True),
    "demo": Entry("training.demo:demo", manifest=False),
}

_table: ContextVar[Mapping[Step, Entry]] = ContextVar("steps", default=STEPS)


def entry(step: Step) -> Entry:
    """The step's entry in the table in force."""
    return _table.get()[step]


def function(step: Step) -> Callable[..., StepResult]:
    """The step's function, imported now."""
    module, name = entry(step).function.split(":")
    found: Callable[..., StepResult] = getattr(importlib.import_module(module), name)
    return found


@contextmanager
def using(table: Mapping[Step, Entry]) -> Iterator[None]:
    """Put other functions in the place of some steps, for whoever plugs in a trainer of their own; in this process only."""
    token = _table.set({**_table.get(), **table})
    try:
        yield
    finally:
        _table.reset(token)
