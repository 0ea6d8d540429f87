"""Seeded generator of the shipped tasks: `python -m agents.generate` writes datasets/{sample_tasks,laptop/*,smoke/*}.jsonl, the same bytes each time.

The splits share no filling: words are dealt out from one shuffled list, and a number belongs to the split that its remainder by four names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

from agents.families import FAMILIES, Fill, Parts
from agents.task import Task, ToolCall, Verifier
from configs.files import write_jsonl
from configs.load import ROOT

T = TypeVar("T")
Name = Literal["train", "rl", "validation", "heldout"]

SHARES: Final[dict[Name, tuple[float, int]]] = {
    "train": (0.25, 0),
    "rl": (0.25, 1),
    "validation": (0.15, 2),
    "heldout": (0.35, 3),
}
"""Split → its share of the words, and the remainder by four of its numbers."""

LAPTOP: Final[dict[Name, int]] = {"train": 64, "rl": 96, "validation": 48, "heldout": 192}
SMOKE: Final[dict[Name, int]] = {"train": 4, "validation": 2, "heldout": 2}
SEEDS: Final = {"laptop": 3, "smoke": 11}
DEALS: Final[dict[Name, str]] = {"train": "train", "rl": "rl", "validation": "validation", "heldout": "heldout/1"}
"""What seeds a split beside its dataset's seed. Counted up where its tasks were looked at while a recipe was tuned: then it is dealt out anew."""

WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


def pools(seed: int) -> dict[Name, tuple[list[str], list[int]]]:
    """Split → its own words and numbers, disjoint between splits."""
    words = list(WORDS)
    random.Random(seed).shuffle(words)
    dealt: dict[Name, tuple[list[str], list[int]]] = {}
    start = 0
    for name, (share, remainder) in SHARES.items():
        end = start + int(share * len(words))
        dealt[name] = (words[start:end], [n for n in range(10, 100) if n % 4 == remainder])
        start = end
    return dealt


def generate(seed: int, sizes: Mapping[Name, int], prefix: str = "") -> dict[Name, list[Task]]:
    """`sizes[split]` tasks for each split, the families taking turns. The same seed and sizes give the same tasks."""
    dealt = pools(seed)
    return {
        name: _split(f"{prefix}{name}", random.Random(f"{seed}/{DEALS[name]}"), *dealt[name], size)
        for name, size in sizes.items()
    }


def _split(prefix: str, rng: random.Random, words: list[str], numbers: list[int], size: int) -> list[Task]:
    names = list(FAMILIES)
    word, number = _dealt(rng, words), _dealt(rng, numbers)
    tasks = []
    for place in range(size):
        family = names[place % len(names)]
        parts = FAMILIES[family](Fill(word, number))
        tasks.append(as_task(f"{prefix}-{place:03d}-{family}", family, parts))
    return tasks


def as_task(id: str, family: str, parts: Parts) -> Task:
    """A whole task from what its family decided."""
    verifier = Verifier(command=parts.check, timeout_s=20.0)
    return Task(
        id=id,
        family=family,
        prompt=parts.prompt,
        files=parts.files,
        protected=parts.protected,
        verifier=verifier,
        solution=parts.solution,
    )


def _dealt(rng: random.Random, pool: list[T]) -> Iterator[T]:
    """The pool over and over, shuffled anew each time; never the same item within two thirds of a pool."""
    recent: list[T] = []
    while True:
        deck = list(pool)
        rng.shuffle(deck)
        late = [item for item in deck if item in recent]
        deck = [item for item in deck if item not in recent] + late
        yield from deck
        recent = deck[-len(deck) // 3 :]


SAMPLE: Final = Task(
    id="hello",
    family="script",
    prompt="Create hello.py that prints hello.",
    verifier=Verifier(command='test "$(python3 hello.py)" = hello'),
    solution=[ToolCall(name="write_file", arguments={"path": "hello.py", "content": "print('hello')\n"})],
)


def write(folder: Path) -> list[Path]:
    """Write every shipped task file below `folder`; returns their paths."""
    files = {folder / "sample_tasks.jsonl": [SAMPLE]}
    for dataset, sizes in (("laptop", LAPTOP), ("smoke", SMOKE)):
        prefix = "" if dataset == "laptop" else f"{dataset}-"
        for split, tasks in generate(SEEDS[dataset], sizes, prefix).items():
            files[folder / dataset / f"{split}.jsonl"] = tasks
    for path, tasks in files.items():
        write_jsonl(path, [task.model_dump(mode="json", exclude_defaults=True) for task in tasks])
    return list(files)


if __name__ == "__main__":
    for written in write(ROOT / "datasets"):
        print(written)
