"""scripts/run.sh and scripts/download_model.py: which commands they run, in which order, with which arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_setup_environment import ROOT, stamp

RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(part) for part in sys.argv[1:]]) + "\\n")
sys.exit(int(os.environ.get("FAIL_AT") == (sys.argv[3] if len(sys.argv) > 3 else "")))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose two environments are finished and whose interpreter writes down how it was called."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    recorder = tmp_path / "recorder"
    recorder.write_text(RECORDER.format(python=sys.executable))
    recorder.chmod(0o755)
    stamp(folder, python=str(recorder))
    return folder


def run(clone: Path, *arguments: str, **environment: str) -> tuple[int, list[list[str]], str]:
    record = clone / "record.jsonl"
    record.unlink(missing_ok=True)
    command = ["bash", str(clone / "scripts" / "run.sh"), *arguments]
    done = subprocess.run(
        command,
        cwd="/",
        env={**os.environ, "RECORD": str(record), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    calls = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return done.returncode, calls, done.stderr


MODEL = ["download_model.py"]
CLI = ["-m", "agentexecutor"]


@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("sft", [MODEL, [*CLI, "collect"], [*CLI, "export"], [*CLI, "sft-train"]]),
        ("rl", [MODEL, [*CLI, "patch-swift"], [*CLI, "rl-prepare"], [*CLI, "rl-train"]]),
        ("all", [MODEL, [*CLI, "all"]]),
        ("infer", [MODEL, [*CLI, "infer"]]),
        ("demo", [[*CLI, "create-demo"]]),
    ],
)
def test_each_word_runs_its_commands_in_order_from_any_folder(clone: Path, what: str, calls: list[list[str]]) -> None:
    assert run(clone, what) == (0, calls, "")


def test_the_profile_goes_to_every_command_and_other_options_to_the_last(clone: Path) -> None:
    _, calls, _ = run(clone, "sft", "--profile", "smoke", "--epochs", "1")
    assert calls == [
        [*MODEL, "--profile=smoke"],
        [*CLI, "collect", "--profile=smoke"],
        [*CLI, "export", "--profile=smoke"],
        [*CLI, "sft-train", "--profile=smoke", "--epochs", "1"],
    ]


def test_a_step_that_fails_ends_the_script_with_its_code(clone: Path) -> None:
    code, calls, _ = run(clone, "sft", FAIL_AT="export")
    assert (code, calls[-1]) == (1, [*CLI, "export"])


def test_test_runs_all_but_the_nightly_tests_and_all_runs_those_too(clone: Path) -> None:
    _, calls, _ = run(clone, "test", "-k", "word")
    assert calls[-1] == ["-m", "pytest", "-m", "not nightly", "-k", "word"]
    _, calls, _ = run(clone, "test", "--all")
    assert calls[-1] == ["-m", "pytest"]


@pytest.mark.parametrize("arguments", [(), ("train",), ("sft", "--profile")])
def test_a_wrong_word_or_a_missing_value_exits_2_and_says_what_is_allowed(
    clone: Path, arguments: tuple[str, ...]
) -> None:
    code, calls, said = run(clone, *arguments)
    assert (code, calls) == (2, [])
    assert "usage: bash scripts/run.sh {sft|rl|all|infer|demo|test}" in said or "--profile needs a value" in said


def test_download_model_without_the_train_environment_names_the_command_that_makes_it(clone: Path) -> None:
    shutil.rmtree(clone / ".venv-train")
    done = subprocess.run(
        [sys.executable, str(clone / "scripts" / "download_model.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "run `python3 scripts/setup_env.py` first" in done.stderr
