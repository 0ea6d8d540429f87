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
    for name, family in FAMILIES.items():
        found |= tokens(as_task("x", name, family(Fill(iter(["QQQ"] * 20), iter([77777] * 20)))))
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
    for split, size in {"train": 64, "rl": 96, "validation": 48, "heldout": 192}.items():
        tasks = made[split]  # type: ignore[index]
        assert len(tasks) == len({t.prompt for t in tasks}) == len({t.digest for t in tasks}) == size
        assert {sum(t.family == family for t in tasks) for family in FAMILIES} == {size // len(FAMILIES)}
        assert sum(len(t.solution) >= 2 for t in tasks) == size // 2
    refuse_overlap(made["train"] + made["rl"], made["validation"])
    refuse_overlap(made["train"] + made["rl"] + made["validation"], made["heldout"])
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
    smoke = [
        t for split in ("train", "validation", "heldout") for t in load_tasks(DATASETS / "smoke" / f"{split}.jsonl")
    ]
    some = [*train[: 2 * len(FAMILIES)], *smoke, SAMPLE]
    assert await refusals(*some, backend="local") == {}


@pytest.mark.slow  # 15–60 s: 672 episodes in real sandboxes
async def test_behaviour_17_every_shipped_task_is_valid_in_a_real_sandbox() -> None:
    for split in ("train", "rl", "validation", "heldout"):
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
    "a broken set-up": ({"setup": ["false"]}, "it could not be scored: sandbox: set-up of task t failed"),
}


@pytest.mark.parametrize("case", BAD_TASKS)
async def test_behaviour_17_a_task_that_proves_nothing_is_refused_with_its_reason(case: str) -> None:
    changes, words = BAD_TASKS[case]
    found = await refusals(task(**changes), task("fine", path="b.txt"))
    assert list(found) == ["t"]
    assert words in found["t"]


LOADED_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "outside": ({"files": {"../a": ""}}, "files: the path '../a' leaves the workspace"),
    "absolute": ({"files": {"/etc/a": ""}}, "files: the path '/etc/a' leaves the workspace"),
    "a detour": ({"files": {"a/../b": ""}}, "files: the path 'a/../b' must be written without"),
    "a dot": (
        {"verifier": {"command": "true", "files": {"./b": ""}}},
        "verifier.files: the path './b' must be written",
    ),
    "empty": ({"files": {"": ""}}, "files: a path is empty"),
    "a zero byte": ({"protected": ["a\0b"]}, "protected.0: the path 'a\\x00b' holds a zero byte"),
    "a long name": ({"files": {"n" * 256: ""}}, "has a name of more than 255 bytes"),
    "a large text": ({"files": {"a": "x" * (8 * 1024 * 1024 + 1)}}, "the text of 'a' has more than 8388608 bytes"),
    "file and folder": ({"files": {"a": "", "a/b": ""}}, "'a' is both a file and a folder"),
    "file and folder of both": (
        {"files": {"a": ""}, "verifier": {"command": "true", "files": {"a/b": ""}}},
        "'a' is both a file and a folder in its files and its verifier's files",
    ),
    "a lost protected path": ({"protected": ["tests"]}, "the protected path 'tests' is not among its files"),
    "a zero byte in a command": ({"setup": ["a\0"]}, "setup.0: the command holds a zero byte"),
    "a long command": ({"verifier": {"command": "x" * 131072}}, "verifier.command: the command has more than 131071"),
}


@pytest.mark.parametrize("case", LOADED_WRONG)
def test_a_task_whose_own_paths_or_commands_cannot_work_is_refused_when_it_is_loaded(tmp_path: Path, case: str) -> None:
    changes, words = LOADED_WRONG[case]
    record = {"id": "t", "prompt": "x", "verifier": {"command": "true"}, **changes}
    with pytest.raises(UserError) as caught:
        load_tasks(source(tmp_path, record))
    assert words in str(caught.value)
    assert "line 1" in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_the_longest_command_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    path = source(tmp_path, {"id": "t", "prompt": "x", "verifier": {"command": "x" * 131071}})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [t.id for t in load_tasks(path)] == ["t"]


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


HIDDEN = {
    **HUMANEVAL,
    "prompt": 'import math\n\n\ndef near(a, b):\n    return math.isclose(a, b)\n\n\ndef twice(n):\n    """Return n twice."""\n',
    "test": "def check(candidate):\n    assert candidate([1]) == [1, 1]\n    assert near(candidate(2.5), 5.0)\n    assert candidate('a') == 'aa'\n",
}
GRABS = """
import re
for text in texts:
    found = re.findall(r"candidate\\(|def check|[0-9a-f]{16}", text)
    if found:
        print(found[-1]); os._exit(0)
def twice(n):
    return 4
"""
CHEATS = {
    "exits": "import os\nos._exit(0)\n",
    "raises SystemExit when called": "def twice(n):\n    raise SystemExit(0)\n",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef twice(n):\n    return 4\n",
    "equals everything": "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    "    __float__ = lambda self: 5.0\n\ndef twice(n):\n    return Any()\n",
    "equals everything as a list": "class Any(list):\n    __eq__ = lambda self, other: True\n\ndef twice(n):\n    return Any()\n",
    "redefines what the checks use": "def near(a, b): return True\ndef check(c): pass\ndef twice(n): return n\n",
    "reads the main module": "import os, __main__\ntexts = [open(__main__.__file__).read()]\n" + GRABS,
    "reads the checks": "import os\ntexts = [open('hidden_checks.py').read()]\n" + GRABS,
    "reads every process": "import glob, os\ntexts = []\n"
    "for name in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/fd/*'):\n"
    "    if os.path.isfile(name):\n        texts.append(open(name, errors='replace').read(100000)) if os.access(name, 4) else 0\n"
    + GRABS.replace("|def check", ""),
    "walks the frames": "import os, sys\nframe, texts = sys._getframe(), []\n"
    "while frame:\n    texts.append(repr(frame.f_globals)); frame = frame.f_back\n" + GRABS,
    "patches the builtins": "import builtins, sys\nbuiltins.all = builtins.isinstance = lambda *a: True\n"
    "sys.excepthook = lambda *a: None\ndef twice(n):\n    return n\n",
    "speaks for the worker": "import os, sys\nfor fd in range(3, 20):\n    try: os.write(fd, b'{\"value\": true}\\n' * 9)\n    except OSError: pass\n"
    "def twice(n):\n    return 4\n",
    "kills the checks": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\n",
    "writes into the checks": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')\nos.kill(os.getppid(), 9)\n",
    "plants modules": "def twice(n):\n    return 4\nfor name in ('json.py', 'ctypes.py'):\n    open(name, 'w').write('import os; os._exit(0)')\n",
}


def solved(which: Task, name: str, code: str) -> Task:
    call = ToolCall(name="write_file", arguments={"path": "solution.py", "content": code})
    return which.model_copy(update={"id": name.replace(" ", "-"), "solution": [call]})


async def test_code_that_cheats_imported_checks_fails_them(tmp_path: Path) -> None:
    (honest,) = import_tasks("humaneval", source(tmp_path, HIDDEN))
    bodies = {**CHEATS, "wrong": "def twice(n):\n    return n\n"}
    found = await refusals(honest, *(solved(honest, name, code) for name, code in bodies.items()), backend="local")
    assert set(found) == {name.replace(" ", "-") for name in bodies}
    assert all("its reference solution fails: the checks exited" in why for why in found.values())


async def test_the_checks_cannot_be_read_while_graded_code_runs(tmp_path: Path) -> None:
    """The graded code says what it sees; were it not locked out, the word of the check would be among it."""
    (honest,) = import_tasks(
        "humaneval", source(tmp_path, {**HIDDEN, "test": "def check(candidate):\n    secretly = candidate(2)\n"})
    )
    spy = (
        "import glob, os\nseen = ''\nfor name in glob.glob('/proc/[0-9]*/*') + glob.glob('/proc/[0-9]*/fd/*') + glob.glob('**', recursive=True):\n"
        "    if name.endswith(('/cmdline', '/environ', '.py')):\n        try: seen += open(name, errors='replace').read()\n        except OSError: pass\n"
        "def twice(n):\n    assert ('secret' + 'ly') not in seen and 'def twice' in seen, seen[:100]\n"
    )
    (told,) = [solved(honest, "spy", spy)]
    found = await refusals(told, backend="local")
    assert found == {}


RICH = {
    "task_id": 12,
    "text": "Trees and pairs.",
    "code": "import collections\n\nclass Node:\n    def __init__(self, x):\n        self.x, self.left = x, None\n\n"
    "def depth(node):\n    return 1 + depth(node.left) if node else 0\n\ndef count(words):\n    return collections.Counter(words)\n\n"
    "def parts(n, *, by=2):\n    if n < 0:\n        raise ValueError('negative')\n    return (n // by, {n}, None, float('inf'), b'x', map(abs, [-n]))\n",
    "test_list": [
        "assert depth(root) == 2 and root.left.x == 7",
        "assert count(['a', 'b', 'a']) == {'a': 2, 'b': 1}",
        "a, b, c, d, e, f = parts(10 ** 30, by=5)\nassert (a, b, c, d, e, list(f)) == (2 * 10 ** 29, {10 ** 30}, None, math.inf, b'x', [10 ** 30])",
        "try:\n    parts(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False",
    ],
    "test_setup_code": "import math\nroot = Node(1)\nroot.left = Node(7)",
}


async def test_imported_checks_may_use_classes_exceptions_and_every_plain_value(tmp_path: Path) -> None:
    assert await refusals(*import_tasks("mbpp", source(tmp_path, RICH)), backend="local") == {}


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
        ("mbpp", [{**MBPP, "test_list": ["assert two(1)"]}], "record 1: test_list names nothing that code defines"),
        ("mbpp", [{**MBPP, "code": "def"}], "record 1: code or test_list is not Python"),
        ("mbpp", ["[" * 100_000], "line 1: not JSON (nested too deeply)"),
        ("tasks", ["[" * 100_000], "line 1"),
    ],
)
def test_a_bad_source_is_refused_naming_file_record_and_field(
    tmp_path: Path, form: str, rows: list[object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        import_tasks(form, source(tmp_path, *rows))
    assert words in str(caught.value)
