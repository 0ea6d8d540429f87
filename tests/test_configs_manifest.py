"""A cache hit is proved (DESIGN 7), and nothing half-written is ever read (DESIGN 8)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError, WorkFailed
from configs.files import exclusive, read_jsonl, write_atomic, write_jsonl
from configs.load import ROOT
from configs.manifest import MANIFEST, StepResult, run_step


def _step(folder: Path, inputs: dict[str, str], made: list[int], force: bool = False) -> StepResult:
    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        made.append(1)
        write_atomic(folder / "rows.jsonl", "{}\n")
        write_atomic(folder / "adapter" / "weights.bin", os.urandom(64))
        return folder, {"rows": folder / "rows.jsonl", "adapter": folder / "adapter"}, {"rows": 1}

    return run_step("export", version=1, inputs=inputs, candidates=lambda: [folder], make=make, force=force)


def test_a_step_runs_once_and_is_then_reused_with_the_same_digest(tmp_path: Path) -> None:
    made: list[int] = []
    first, second = _step(tmp_path, {"a": "1"}, made), _step(tmp_path, {"a": "1"}, made)
    assert (first.reused, second.reused, len(made)) == (False, True, 1)
    assert first.digest == second.digest
    assert second.outputs == {"rows": tmp_path / "rows.jsonl", "adapter": tmp_path / "adapter"}


@pytest.mark.parametrize("victim", ["rows.jsonl", "adapter/weights.bin", MANIFEST])
@pytest.mark.parametrize("how", ["delete", "truncate", "alter"])
def test_a_missing_or_changed_output_runs_the_step_again(tmp_path: Path, victim: str, how: str) -> None:
    made: list[int] = []
    _step(tmp_path, {"a": "1"}, made)
    file = tmp_path / victim
    if how == "delete":
        file.unlink()
    elif how == "truncate":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        file.write_bytes(bytes(b ^ 1 for b in file.read_bytes()))
    assert not _step(tmp_path, {"a": "1"}, made).reused


def test_a_changed_input_is_named_as_the_reason(tmp_path: Path) -> None:
    made: list[int] = []
    _step(tmp_path, {"rows": "1", "profile": "x"}, made)
    again = _step(tmp_path, {"rows": "2", "profile": "x"}, made)
    assert (again.reused, again.why) == (False, "rows changed")


def test_force_runs_an_unchanged_step(tmp_path: Path) -> None:
    made: list[int] = []
    _step(tmp_path, {}, made)
    assert _step(tmp_path, {}, made, force=True).why == "it was forced"


def test_a_step_that_raises_leaves_no_manifest(tmp_path: Path) -> None:
    def make() -> tuple[Path, dict[str, Path], dict[str, Any]]:
        (tmp_path / "half").write_text("x")
        raise WorkFailed("no")

    with pytest.raises(WorkFailed):
        run_step("sft", version=1, inputs={}, candidates=lambda: [tmp_path], make=make)
    assert not (tmp_path / MANIFEST).exists()


def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    write_atomic(file, "old")
    blocked = tmp_path / "kept.txt" / "below"
    with pytest.raises(WorkFailed, match="cannot be written"):
        write_atomic(blocked, "new")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_a_write_that_runs_out_of_room_is_one_sentence_and_the_old_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    write_atomic(file, "old")
    code = (
        "import resource, sys; from pathlib import Path; from configs.files import write_atomic; from configs.errors import WorkFailed\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write_atomic(Path(sys.argv[1]), b'x' * 8192)\n"
        "except WorkFailed as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "cannot be written" in done.stdout
    assert "unchanged" in done.stdout
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("kept.txt", "old")]


@given(st.lists(st.dictionaries(st.text(), st.one_of(st.none(), st.integers(), st.text())), max_size=8))
def test_jsonl_survives_any_rows(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_jsonl(file, rows)
    assert read_jsonl(file) == rows


def test_a_cut_jsonl_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": ')
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2"):
        read_jsonl(file)


def test_the_second_holder_of_a_lock_is_told_who_has_it(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / ".lock", "output"),
        pytest.raises(UserError, match=f"process {os.getpid()}"),
        exclusive(tmp_path / ".lock", "output"),
    ):
        raise AssertionError("two holders")
