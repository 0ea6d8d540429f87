"""Tasks: shipped ones are valid, new ones must prove themselves, and the splits share nothing."""

from __future__ import annotations

import json
import keyword
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from agents_kit import task

from agents.families import FAMILIES, Fill
from agents.generate import LAPTOP, SAMPLE, SEEDS, SMOKE, WORDS, as_task, generate, pools, write
from agents.importers import import_tasks
from agents.task import Task, ToolCall, Verifier, load_tasks, refuse_overlap
from agents.tools import schemas
from agents.validate import validate_tasks
from configs.errors import UserError
from configs.load import ROOT
from sandboxes import SandboxPool, make_backend
from sandboxes.mock import MockBackend

DATASETS = ROOT / "datasets"


def tokens(which: Task) -> set[str]:
    """Words and numbers of everything that a task says; its id and family are names of ours."""
    return set(re.findall(r"[A-Za-z]+|\d+", which.model_dump_json(exclude={"id", "family", "limits"})))


def template_words() -> set[str]:
    """What the families say whatever fills them."""
    found: set[str] = set()
    for place in range(8):
        for name, family in FAMILIES.items():
            fill = Fill(iter(["QQQ"] * 20), iter([77777] * 20), place)
            found |= tokens(as_task("x", name, family(fill)))
    return found - {"QQQ", "77777"}


@pytest.mark.parametrize("dataset", ["laptop", "smoke"])
def test_no_name_value_or_filling_is_shared_between_the_splits(dataset: str) -> None:
    fixed = template_words()
    fillings: dict[str, set[str]] = {}
    for path in sorted((DATASETS / dataset).glob("*.jsonl")):
        fillings[path.stem] = set().union(*(tokens(which) for which in load_tasks(path))) - fixed
        assert fillings[path.stem]
    names = sorted(fillings)
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            assert fillings[first] & fillings[second] == set()


def test_the_pools_are_disjoint_and_no_word_shadows_a_module_or_a_keyword() -> None:
    for seed in SEEDS.values():
        words = [word for pool, _ in pools(seed).values() for word in pool]
        numbers = [number for _, pool in pools(seed).values() for number in pool]
        assert len(words) == len(set(words))
        assert len(numbers) == len(set(numbers))
    assert not set(WORDS) & (set(sys.stdlib_module_names) | set(keyword.kwlist) | template_words())


def test_the_shipped_files_are_what_the_generator_makes(tmp_path: Path) -> None:
    for path in write(tmp_path):
        shipped = DATASETS / path.relative_to(tmp_path)
        assert path.read_bytes() == shipped.read_bytes(), f"run `python -m agents.generate`: {shipped} differs"


def test_the_splits_have_their_sizes_and_are_balanced_and_distinct() -> None:
    made = generate(SEEDS["laptop"], LAPTOP)
    for split, size in {"train": 64, "validation": 48, "heldout": 192}.items():
        tasks = made[split]  # type: ignore[index]
        assert len(tasks) == len({t.prompt for t in tasks}) == len({t.digest for t in tasks}) == size
        assert {sum(t.family == family for t in tasks) for family in FAMILIES} == {size // len(FAMILIES)}
        assert sum(len(t.solution) >= 2 for t in tasks) == size // 2
    refuse_overlap(made["train"], made["heldout"])
    refuse_overlap(made["train"] + made["validation"], made["heldout"])
    assert {name: len(tasks) for name, tasks in generate(SEEDS["smoke"], SMOKE).items()} == SMOKE


def test_solutions_use_the_two_tools_of_the_laptop_profile_and_stay_short() -> None:
    for path in [*DATASETS.rglob("laptop/*.jsonl"), *DATASETS.rglob("smoke/*.jsonl"), DATASETS / "sample_tasks.jsonl"]:
        for which in load_tasks(path):
            assert {call.name for call in which.solution} <= {"bash", "write_file"}
            assert len(which.prompt) < 100
            assert all(len(json.dumps(call.arguments)) < 120 for call in which.solution)
    assert len(json.dumps(schemas(["bash", "write_file"]))) < 480


async def refusals(*tasks: Task, backend: str = "mock") -> dict[str, str]:
    made = MockBackend() if backend == "mock" else make_backend(backend)
    async with SandboxPool(made, run_id="test-validate", concurrency=4) as pool:
        return await validate_tasks(tasks, pool)


async def test_behaviour_17_every_family_of_the_shipped_tasks_is_valid_in_a_real_sandbox() -> None:
    train = load_tasks(DATASETS / "laptop" / "train.jsonl")
    smoke = [t for split in ("train", "heldout") for t in load_tasks(DATASETS / "smoke" / f"{split}.jsonl")]
    some = [*train[:32], *smoke, SAMPLE]  # each family in each of its variants
    assert await refusals(*some, backend="local") == {}


@pytest.mark.slow  # 15–45 s: 480 episodes in real sandboxes
async def test_behaviour_17_every_shipped_heldout_and_validation_task_is_valid_in_a_real_sandbox() -> None:
    for split in ("validation", "heldout"):
        assert await refusals(*load_tasks(DATASETS / "laptop" / f"{split}.jsonl"), backend="local") == {}


BAD_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "no solution": ({"solution": []}, "no reference solution"),
    "a failing solution": (
        {"solution": [ToolCall(name="bash", arguments={"command": "true"})]},
        "its reference solution fails: the checks exited 1",
    ),
    "passes by itself": ({"verifier": Verifier(command="true")}, "doing nothing passes"),
    "already done": ({"files": {"a.txt": ""}}, "doing nothing passes"),
    "an unknown tool": ({"solution": [ToolCall(name="sh")]}, "call 1 of its solution is wrong: there is no tool 'sh'"),
    "wrong arguments": (
        {"solution": [ToolCall(name="bash", arguments={"cmd": "ls"})]},
        "call 1 of its solution is wrong",
    ),
    "a lost protected path": ({"protected": ["tests"]}, "the protected path 'tests' is not among its files"),
    "outside": ({"files": {"../a": ""}}, "leaves the workspace"),
    "a broken set-up": ({"setup": ["false"]}, "it could not be scored: sandbox: set-up of task t failed"),
}


@pytest.mark.parametrize("case", BAD_TASKS)
async def test_behaviour_17_a_task_that_proves_nothing_is_refused_with_its_reason(case: str) -> None:
    changes, words = BAD_TASKS[case]
    found = await refusals(task(**changes), task("fine", path="b.txt"))
    assert list(found) == ["t"]
    assert words in found["t"]


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n):\n    """Return n twice."""\n',
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "twice",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to add one.",
    "code": "def one(n):\r\n    return n + 1",
    "test_list": ["assert one(1) == 2"],
    "test_setup_code": "",
}


def source(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "source.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


async def test_imported_tasks_are_valid_and_wrong_solutions_of_them_fail(tmp_path: Path) -> None:
    tasks = [*import_tasks("humaneval", source(tmp_path, HUMANEVAL)), *import_tasks("mbpp", source(tmp_path, MBPP))]
    assert [t.id for t in tasks] == ["HumanEval-0", "mbpp-11"]
    early = ToolCall(
        name="write_file",
        arguments={"path": "solution.py", "content": "def twice(n): return 4\nimport os; os._exit(0)\n"},
    )
    exits_early = tasks[0].model_copy(update={"id": "early", "solution": [early]})
    found = await refusals(*tasks, exits_early, backend="local")
    assert list(found) == ["early"]


def test_our_own_format_is_imported_unchanged(tmp_path: Path) -> None:
    path = source(tmp_path, SAMPLE.model_dump_json())
    assert import_tasks("tasks", path) == [SAMPLE]


@pytest.mark.parametrize(
    ("form", "rows", "words"),
    [
        ("swe", [HUMANEVAL], "there is no format 'swe'; use one of humaneval, mbpp, tasks"),
        ("humaneval", [HUMANEVAL, {**HUMANEVAL, "test": ""}], "record 2: test is missing"),
        ("humaneval", [HUMANEVAL, HUMANEVAL], "the id 'HumanEval-0' is there twice"),
        ("mbpp", [{**MBPP, "test_list": "assert one(1)"}], "record 1: test_list must be a list"),
        ("mbpp", [MBPP, '{"task_id": '], "line 2: not JSON"),
        ("mbpp", [[1]], "record 1: a record is one JSON object"),
        ("mbpp", [], "holds no record"),
    ],
)
def test_a_bad_source_is_refused_naming_file_record_and_field(
    tmp_path: Path, form: str, rows: list[object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        import_tasks(form, source(tmp_path, *rows))
    assert words in str(caught.value)
