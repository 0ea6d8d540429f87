"""The command line as a newcomer types it: real processes, exit codes, one sentence for a mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import ROOT, load_profile, shipped

HEAVY = {"prefect", "torch", "swift", "vllm", "litellm", "e2b", "pydantic", "yaml", "pyarrow", "httpx", "rich"}
FAKE_KEY = "marked-fake-key-5c1f"


def cli(*words: str, env: dict[str, str] | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("LLM_API_KEY", "E2B_API_KEY", "LLM_MODEL", "EPOCHS")}
    command = [sys.executable, "-m", "agentexecutor", *words]
    environ = {**clean, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT, env=environ)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, agentexecutor.__main__ as m\n"
        "sys.argv = ['agentexecutor', '--help']\n"
        "try: m.main()\n"
        "except SystemExit as e: assert e.code in (0, None), e.code\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_every_subcommand_of_the_design_exists_with_a_help_line() -> None:
    steps = ["collect", "export", "sft-train", "rl-prepare", "rl-train", "rl-loop", "infer", "evaluate", "create-demo"]
    around = ["patch-swift", "validate-tasks", "import-tasks", "view", "plan", "clean", "doctor", "deploy"]
    shown = cli("--help").stdout
    for name in ["run", "all", *steps, *around]:
        assert re.search(rf"^  {name}  +\S.*$", shown, re.MULTILINE), name


@pytest.mark.parametrize("profile", shipped())
@pytest.mark.parametrize(
    "command", [("sft-train",), ("rl-train",), ("infer", "--query", "What is the capital of France?")]
)
def test_dry_run_prints_the_whole_command_of_any_profile_without_torch(profile: str, command: tuple[str, ...]) -> None:
    done = cli(*command, "--profile", profile, "--dry-run", env={"E2B_API_KEY": FAKE_KEY, "LLM_API_KEY": FAKE_KEY})
    assert done.returncode == 0, done.stderr
    assert f"--template {load_profile(profile, environ={}).model.template}" in done.stdout
    assert FAKE_KEY not in done.stdout + done.stderr
    assert "torch.distributed.run" in done.stdout or command[0] == "infer"


def test_run_with_the_mocks_writes_the_file_that_the_prompt_names() -> None:
    done = cli("run", "--prompt", "create /workspace/hi.py", "--backend", "mock", "--llm", "mock")
    assert done.returncode == 0, done.stderr
    assert "── hi.py" in done.stdout
    assert "stopped: finished" in done.stdout


def test_run_writes_the_file_in_a_real_sandbox_too() -> None:
    done = cli("run", "--prompt", "create /workspace/hi.py", "--backend", "local", "--llm", "mock", "--json")
    assert done.returncode == 0, done.stderr
    assert "hi.py" in json.loads(done.stdout)["files"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("collect", "--tasks", "nowhere.jsonl"), "there is no such task file"),
        (("collect", "--backend", "docker"), "sandboxes.backend"),
        (("sft-train", "--rows", "nowhere.jsonl"), "nowhere.jsonl"),
        (("collect", "--profile", "nowhere"), "there is no profile 'nowhere'"),
        (("sft-train", "--epochs", "0"), "sft.epochs"),
        (("evaluate", "--adapter", "broken"), "NAME=FOLDER"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = cli(*words, "--output-dir", str(tmp_path / "output"))
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_profile_without_its_keys_exits_2_and_names_them(tmp_path: Path) -> None:
    done = cli("collect", "--profile", "qwen3.8-27b-4gpu", "--output-dir", str(tmp_path))
    assert done.returncode == 2
    assert "LLM_API_KEY" in done.stderr
    assert "E2B_API_KEY" in done.stderr


def test_collect_and_export_work_one_after_the_other(tmp_path: Path) -> None:
    common = ("--profile", "laptop", "--data-dir", str(tmp_path / "data"), "--output-dir", str(tmp_path / "output"))
    done = cli("collect", "--tasks", "datasets/sample_tasks.jsonl", "--backend", "local", "--agent", "builtin", *common)
    assert done.returncode == 0, done.stderr
    rows = tmp_path / "data" / "agent_lora_sft" / "sft" / "train.jsonl"
    done = cli("export", "--out", str(rows), *common)
    assert done.returncode == 0, done.stderr
    assert len(rows.read_text().splitlines()) == 1
    again = cli("collect", "--tasks", "datasets/sample_tasks.jsonl", "--json", *common)
    assert json.loads(again.stdout)["reused"] is True


def test_all_refuses_a_broken_task_line_at_once_and_without_a_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "tasks.jsonl"
    broken.write_text('{"id": "a", "prompt": "x", "verifier": {"command": "true"}, "bogus": 1}\n')
    profile = tmp_path / "mine.yaml"
    text = (ROOT / "configs" / "profiles" / "smoke.yaml").read_text()
    profile.write_text(text.replace("datasets/smoke/train.jsonl", str(broken)))
    done = cli("all", "--profile", str(profile), "--data-dir", str(tmp_path / "d"), "--output-dir", str(tmp_path / "o"))
    assert done.returncode == 2, done.stderr
    assert f"{broken}, line 1: bogus" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o" / ".prefect").exists()


@pytest.mark.parametrize("words", [("all",), ("rl-prepare",)])
def test_a_held_out_task_that_is_also_in_train_is_refused_before_anything_is_paid_for(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    both = tmp_path / "tasks.jsonl"
    datasets = ROOT / "datasets" / "smoke"
    both.write_text((datasets / "train.jsonl").read_text() + (datasets / "heldout.jsonl").read_text().splitlines()[0])
    profile = tmp_path / "mine.yaml"
    text = (ROOT / "configs" / "profiles" / "smoke.yaml").read_text()
    profile.write_text(text.replace("datasets/smoke/train.jsonl", str(both)))
    done = cli(
        *words, "--profile", str(profile), "--data-dir", str(tmp_path / "d"), "--output-dir", str(tmp_path / "o")
    )
    assert done.returncode == 2, done.stderr
    assert "is also in the training split" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_without_bubblewrap_says_so_before_it_starts_a_server(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tools / "bwrap").chmod(0o755)
    words = ("all", "--profile", "smoke", "--data-dir", str(tmp_path / "d"), "--output-dir", str(tmp_path / "o"))
    done = cli(*words, env={"PATH": f"{tools}:{os.environ['PATH']}"})
    assert done.returncode == 2, done.stderr
    assert "bubblewrap" in done.stderr.lower()
    assert not (tmp_path / "o" / ".prefect").exists()


def test_a_file_where_a_folder_is_expected_is_one_sentence_also_as_json(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = cli(
        "collect", "--profile", "smoke", "--data-dir", str(blocked), "--output-dir", str(tmp_path / "o"), "--json"
    )
    assert done.returncode == 1, done.stderr
    assert str(blocked) in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


def test_create_demo_before_there_are_results_checks_the_bundle_and_leaves_it(tmp_path: Path) -> None:
    bundle = ROOT / "datasets" / "demo"
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    done = cli(
        "create-demo", "--profile", "laptop", "--output-dir", str(tmp_path / "o"), "--data-dir", str(tmp_path / "d")
    )
    assert done.returncode == 0, done.stderr
    assert "no results yet" in done.stdout
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    nowhere = cli(
        "create-demo", "--profile", "laptop", "--output-dir", str(tmp_path / "o"), "--out", str(tmp_path / "x")
    )
    assert nowhere.returncode == 2
    assert "agentexecutor infer" in nowhere.stderr
