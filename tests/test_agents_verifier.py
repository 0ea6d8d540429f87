"""A verdict can't be gamed: real sandboxes, and an agent that tries."""

from __future__ import annotations

import io
import tarfile

import pytest
from agents_kit import Says, call, write

from agents.episode import Settings, run_episode
from agents.gitconfig import harmless
from agents.planted import without_planted
from agents.task import Limits, Task, Verifier
from agents.trajectory import Trajectory, Verdict
from agents.verifier import grade
from sandboxes import SandboxPool, make_backend
from sandboxes.base import SandboxError

TESTS = """
import unittest
import answer

class T(unittest.TestCase):
    def test_it(self):
        self.assertEqual(answer.value(), 42)

unittest.main()
"""

TASK = Task(
    id="answer",
    prompt="Make value() in answer.py return 42.",
    files={"answer.py": "def value():\n    return 0\n", "tests/check.py": TESTS, "expected.txt": "42\n"},
    protected=["tests", "expected.txt"],
    verifier=Verifier(
        command='PYTHONPATH=. python3 tests/check.py && PYTHONPATH=. python3 tests/hidden.py && test "$(cat out.txt)" = "$(cat expected.txt)"',
        files={"tests/hidden.py": TESTS},
    ),
    limits=Limits(command_timeout_s=20),
)

HONEST = [write("answer.py", "def value():\n    return 42\n"), call("bash", command="echo 42 > out.txt"), "Done."]


async def judged(*turns: str, task: Task = TASK) -> Trajectory:
    async with SandboxPool(make_backend("local"), run_id="test-verifier", concurrency=2) as pool:
        trajectory = await run_episode(
            task, lambda _: Says(turns), pool, Settings(max_turns=10, run_id="test-verifier")
        )
    assert pool.created == pool.killed
    return trajectory


def sh(command: str) -> str:
    return call("bash", command=command)


GIT = "git -c user.name=a -c user.email=a@b"
SHADOW = "printf '#!/bin/sh\\nexit 0\\n'"
OUT = sh("echo 42 > out.txt")
"""Each cheat does half of the task honestly, so that only the other half's check stands in its way."""
CODE = HONEST[0]

CHEATS = {
    "edits the visible and the hidden tests": [
        OUT,
        sh("echo 'print(1)' > tests/check.py; echo 'print(1)' > tests/hidden.py"),
    ],
    "edits the expected file": [CODE, sh("echo x > expected.txt; echo x > out.txt")],
    "commits its edits of the tests": [
        OUT,
        sh(f"for t in check hidden; do echo > tests/$t.py; done; git init -q . && {GIT} add -A && {GIT} commit -qm x"),
    ],
    "plants reward files": [
        CODE,
        sh("echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json; mkdir -p logs; echo 1 > logs/reward.txt"),
    ],
    "plants sitecustomize": [OUT, write("sitecustomize.py", "import os\nos._exit(0)\n")],
    "plants compiled code": [
        OUT,
        sh(
            "printf 'def value():\\n    return 42\\n' > x.py; mkdir -p __pycache__; python3 -c \"import py_compile as c;"
            " c.compile('x.py', '__pycache__/answer.cpython-3' + str(__import__('sys').version_info[1]) + '.pyc', dfile='answer.py',"
            ' invalidation_mode=c.PycInvalidationMode.UNCHECKED_HASH)"'
        ),
    ],
    "patches the interpreter": [
        OUT,
        sh(
            f"mkdir -p /tmp/bin; {SHADOW} > /tmp/bin/python3; chmod +x /tmp/bin/python3; echo 'PATH=/tmp/bin:$PATH' > /tmp/.bashrc; cp /tmp/bin/python3 ."
        ),
        sh("cp /tmp/bin/python3 /usr/bin/python3; cp /tmp/bin/python3 /usr/local/bin/python3"),
    ],
    "puts a folder in the hidden file's place": [OUT, sh("mkdir -p tests/hidden.py/x")],
    "links the tests folder to its own": [
        OUT,
        sh("rm -rf tests; mkdir mine; echo 'print(1)' > mine/check.py; ln -s mine tests"),
    ],
    "links its output to the expected file": [CODE, sh("ln -s expected.txt out.txt")],
    "links its output to the expected file by a detour": [CODE, sh("ln -s . here; ln -s here/expected.txt out.txt")],
    "links by a folder's own parent": [
        CODE,
        sh("mkdir -p a/b; ln -s a/b l; ln -s l/../../expected.txt out.txt; cat out.txt"),
    ],
    "links by a folder's own parent in two steps": [
        CODE,
        sh("mkdir -p a/b; ln -s a/b l; ln -s l/../.. t2; ln -s t2/expected.txt out.txt; cat out.txt"),
    ],
    "plants sitecustomize as a package": [OUT, write("sitecustomize/__init__.py", "import os\nos._exit(0)\n")],
    "plants a module of the standard library": [OUT, write("unittest.py", "import os\nos._exit(0)\n")],
    "plants a package of the standard library": [OUT, write("unittest/__init__.py", "import os\nos._exit(0)\n")],
    "links a package of the standard library": [
        OUT,
        sh("mkdir mine; echo 'import os; os._exit(0)' > mine/__init__.py; ln -s mine unittest"),
    ],
    "plants a module beside the checks": [OUT, write("tests/unittest.py", "import os\nos._exit(0)\n")],
    "closes the tests folder": [OUT, sh("chmod 555 tests")],
    "leaves a daemon that edits files during grading": [
        sh(
            "(setsid bash -c 'while :; do for t in check hidden; do echo > tests/$t.py; done; echo 42 > out.txt; sleep 0.01; done' >/dev/null 2>&1 &)"
        )
    ],
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_behaviour_15_an_agent_that_cheats_still_fails(cheat: str) -> None:
    trajectory = await judged(*CHEATS[cheat], "Done.")
    assert trajectory.outcome.verdict is Verdict.FAILED, trajectory.outcome


async def test_behaviour_15_the_honest_agent_passes_although_its_own_edits_of_the_tests_do_not_count() -> None:
    trajectory = await judged(sh("rm -rf tests expected.txt; ln -s answer.py tests"), *HONEST)
    assert trajectory.outcome.verdict is Verdict.PASSED, trajectory.outcome


async def test_checks_that_never_end_fail_at_their_deadline() -> None:
    slow = TASK.model_copy(update={"verifier": Verifier(command="python3 loop.py", timeout_s=0.5)})
    trajectory = await judged(write("loop.py", "while True: pass\n"), "Done.", task=slow)
    assert (trajectory.outcome.verdict, trajectory.outcome.reason) == (
        Verdict.FAILED,
        "the checks did not end within 0.5 s",
    )


def archive(*entries: tuple[str, str | None, str | None]) -> bytes:
    """(name, text or None, link target or None); neither is a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text, link in entries:
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE if link else tarfile.REGTYPE if text is not None else tarfile.DIRTYPE
            info.linkname = link or ""
            info.size = len(text or "")
            tar.addfile(info, io.BytesIO((text or "").encode()) if text else None)
    return out.getvalue()


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def test_only_what_interferes_with_grading_is_dropped() -> None:
    kept = [
        ("src", None, None),
        ("src/a.py", "x", None),
        ("link.py", None, "src/a.py"),
        ("venv-python", None, "/usr/bin/python3"),
        ("notes", "", None),
    ]
    dropped = [
        ("tests", None, "src"),
        ("tests/check.py", "x", None),
        ("expected.txt", None, None),
        ("deep/__pycache__/a.pyc", "x", None),
        ("conftest.py", "x", None),
        ("all", None, "."),
        ("up", None, "../workspace/tests"),
        ("proc", None, "/proc/self/cwd"),
        ("answer", None, "/workspace/expected.txt"),
    ]
    assert names(without_planted(TASK, archive(*kept, *dropped))) == [name for name, _, _ in kept]


EXPECTS = Task(
    id="expects",
    prompt="Write out.txt.",
    files={"tests/expected.txt": "42\n"},
    protected=["tests"],
    verifier=Verifier(command="diff out.txt tests/expected.txt || diff out/expected.txt tests/expected.txt"),
)
DETOURS = {
    "direct": "mkdir -p a/b; ln -s a/b l; ln -s l/../../tests/expected.txt out.txt; test -f out.txt",
    "chained": "mkdir -p a/b; ln -s a/b l; ln -s l/../../tests t2; ln -s t2/expected.txt out.txt; test -f out.txt",
    "folder": "mkdir -p a/b out; ln -s a/b l; ln -s ../l/../../tests/expected.txt out/expected.txt; test -f out/expected.txt",
    "absolute": "mkdir -p a/b; ln -s a/b l; ln -s /workspace/l/../../tests/expected.txt out.txt; test -f out.txt",
    "by the system": "ln -s /usr/../workspace/tests/expected.txt out.txt; test -f out.txt",
    "hard": "ln tests/expected.txt other; mkdir -p x; ln -s ../tests x/t; ln -s x/t/expected.txt out.txt; test -f out.txt",
}


@pytest.mark.parametrize("detour", DETOURS)
async def test_no_detour_of_links_reaches_the_expected_file(detour: str) -> None:
    trajectory = await judged(sh(DETOURS[detour]), "Done.", task=EXPECTS)
    assert "exit_code: 0" in trajectory.messages[3].content, "the detour itself must work, or this shows nothing"
    assert trajectory.outcome.verdict is Verdict.FAILED, trajectory.outcome


def test_links_within_the_agents_own_files_stay() -> None:
    kept = [
        ("a/b/c.txt", "x", None),
        ("l", None, "a/b"),
        ("a/up", None, "../a/b/c.txt"),
        ("a/b/far", None, ".././../l/c.txt"),
    ]
    assert names(without_planted(EXPECTS, archive(*kept, ("m", None, "l/../b")))) == [name for name, _, _ in kept]


def test_a_hard_link_is_dropped() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (
            ("tests/expected.txt", tarfile.REGTYPE),
            ("out.txt", tarfile.LNKTYPE),
            ("a", tarfile.REGTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "tests/expected.txt" if kind == tarfile.LNKTYPE else ""
            tar.addfile(info)
    assert names(without_planted(EXPECTS, out.getvalue())) == ["a"]


PLANTED = [
    "sitecustomize/__init__.py",
    "deep/sitecustomize.pyc",
    "usercustomize.cpython-311-x86_64-linux-gnu.so",
    "pkg/conftest.pyc",
    "conftest/__init__.pyc",
    "setup.cfg",
    "sub/tox.ini",
    "pyproject.toml",
    ".pytest.ini",
    "json.py",
    "json.cpython-311-x86_64-linux-gnu.so",
    "unittest/__init__.py",
    "tests2/reward.txt",
    "checks/random.py",
    "pytest.py",
]
HONEST_FILES = [
    "html/index.html",
    "test/data.txt",
    "json",
    "pkg/json.py",
    "unittest/main.py",
    "calendar.txt",
    "mysetup.cfg",
]


def test_files_that_programs_load_unasked_are_dropped_and_others_stay() -> None:
    task = EXPECTS.model_copy(update={"verifier": Verifier(command="true", files={"checks/run.py": ""})})
    entries = [(name, "x", None) for name in [*PLANTED, *HONEST_FILES]]
    assert names(without_planted(task, archive(*entries))) == HONEST_FILES


def test_what_the_task_asks_for_or_brings_stays() -> None:
    task = EXPECTS.model_copy(
        update={
            "prompt": "Create calendar.py, ./queue.py and the package email/ and list them in pyproject.toml. Parse json with care.",
            "files": {**EXPECTS.files, "types.py": "x", "conftest/a.py": "x"},
        }
    )
    kept = ["calendar.py", "queue.py", "email/__init__.py", "pyproject.toml", "types.py", "conftest/a.py"]
    dropped = ["json.py", "json/__init__.py", "calendar.pyc", "types/__init__.py", "conftest.py", "src/pyproject.toml"]
    assert names(without_planted(task, archive(*((name, "x", None) for name in [*kept, *dropped])))) == kept


async def test_git_runs_nothing_of_the_agents_in_grading_and_the_repository_stays() -> None:
    wants = EXPECTS.model_copy(
        update={
            "verifier": Verifier(
                command='git -c safe.directory="*" status && git -c safe.directory="*" -c user.name=a -c user.email=a@b commit -q --allow-empty -m y;'
                ' test "$(git -c safe.directory="*" log --format=%s | tail -n 1)" = x && test "$(git config remote.o.url)" = there && test ! -e ran'
            )
        }
    )
    make = f"git init -q . && {GIT} commit -q --allow-empty -m x && git config remote.o.url there"
    evil = "printf '#!/bin/sh\\ntouch ran\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; git config core.fsmonitor 'touch ran; :'"
    tried = await judged(sh(f"{make} && {evil} && git status; test -e ran && rm ran"), "Done.", task=wants)
    assert "exit_code: 0" in tried.messages[3].content, "outside grading git must run them, or this shows nothing"
    assert tried.outcome.verdict is Verdict.PASSED, tried.outcome


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ("[core]\n\tbare = false\n\tfsmonitor = x\n\thooksPath=h\n", "[core]\n\tbare = false\n"),
        ("[core] fsmonitor = x\n\tbare = false\n", ""),
        ('[core "x"] fsmonitor = x\n[user]\nname = a\n', "[user]\n\tname = a\n"),
        ("[user]\nname = a\\\n[core]\nfsmonitor = x\n", "[user]\n[core]\n"),
        (
            '[include]\npath = x\n[alias]\nlog = !x\n[remote "o"]\nurl = u\nuploadpack = x\n',
            '[remote "o"]\n\turl = u\n',
        ),
    ],
)
def test_a_git_configuration_keeps_only_what_describes_the_repository(config: str, left: str) -> None:
    assert harmless(config.encode()).decode() == left


async def test_a_task_whose_own_files_are_refused_is_the_infrastructures_failure() -> None:
    refused = EXPECTS.model_copy(update={"verifier": Verifier(command="true", files={"/".join(["n" * 200] * 25): "x"})})
    async with SandboxPool(make_backend("local"), run_id="test-verifier", concurrency=1) as pool:
        with pytest.raises(SandboxError, match="the task's own file"):
            await grade(refused, archive(("a", "x", None)), pool)


def test_a_file_that_the_task_itself_brings_stays() -> None:
    own = TASK.model_copy(update={"files": {**TASK.files, "conftest.py": "x"}})
    assert names(without_planted(own, archive(("conftest.py", "x", None)))) == ["conftest.py"]
