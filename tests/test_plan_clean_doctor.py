"""Small commands around a run: memory arithmetic, cleaning, and the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.files import exclusive, write_atomic
from configs.load import load_profile
from configs.profile import Profile
from configs.run import Layout, new_run
from tasks_lib.doctor import examine
from training.clean import clean
from training.plan import lora_parameters, plan


def _profile(tmp_path: Path, name: str = "laptop") -> Profile:
    flags = {
        "paths.output": str(tmp_path / "output"),
        "paths.models": str(tmp_path / "models"),
        "paths.data": str(tmp_path / "data"),
    }
    return load_profile(name, environ={}, flags=flags)


def test_the_reference_fits_four_cards_only_with_tensor_parallel(tmp_path: Path) -> None:
    reference = _profile(tmp_path, "qwen3.8-27b-4gpu")
    budget = plan(reference, 80)
    assert budget.fits
    assert budget.parts["trainer weights"] == pytest.approx(27e9 * 2 / 4 / 1024**3)
    assert budget.parts["vLLM"] == pytest.approx(0.25 * 80e9 / 1024**3)
    alone = reference.model_copy(update={"rollout": reference.rollout.model_copy(update={"tensor_parallel": 1})})
    assert not plan(alone, 80).fits
    assert "VLLM_TP" in plan(alone, 80).advice


def test_lora_parameters_are_rank_times_in_plus_out_over_all_linear_layers(tmp_path: Path) -> None:
    profile = _profile(tmp_path)
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
    }
    write_atomic(profile.model_path / "config.json", json.dumps(config))
    by_hand = 8 * 30 * ((576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 3)
    assert lora_parameters(profile) == by_hand == 2_442_240


def test_an_unknown_model_is_asked_to_be_downloaded_first(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="download_model"):
        plan(_profile(tmp_path, "smoke"), 80)


def test_clean_keeps_the_newest_of_each_kind_and_every_foreign_file(tmp_path: Path) -> None:
    profile = _profile(tmp_path)
    layout = Layout(profile)
    for parent in (layout.sft, layout.grpo):
        for number in (1, 2, 10):
            write_atomic(parent / f"v{number}-20260101-000000" / "checkpoint-1" / "adapter.bin", "x")
    write_atomic(layout.sft / "notes" / "mine.txt", "keep")
    would = clean(profile, keep=1, dry_run=True)
    assert sorted(p.name for p in would) == ["v1-20260101-000000"] * 2 + ["v2-20260101-000000"] * 2
    assert all(p.is_dir() for p in would)
    assert clean(profile, keep=1, dry_run=False) == would
    assert [p.name for p in sorted(layout.sft.iterdir())] == ["notes", "v10-20260101-000000"]


def test_clean_keeps_the_newest_runs(tmp_path: Path) -> None:
    profile = _profile(tmp_path)
    for name in ("first", "second"):
        new_run(profile, run_id=name).event("start")
    assert [p.name for p in clean(profile, keep=1, dry_run=False)] == ["first"]


def test_clean_is_refused_while_a_run_holds_the_output(tmp_path: Path) -> None:
    profile = _profile(tmp_path)
    new_run(profile, run_id="one").event("start")
    with exclusive(Layout(profile).lock, "output"), pytest.raises(UserError, match="is in use by"):
        clean(profile, keep=0, dry_run=False)


def test_the_doctor_names_a_missing_model_and_missing_keys_with_their_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.setenv("LLM_API_KEY", "marked-secret-value")
    lines = {line.what: line for line in examine(_profile(tmp_path, "qwen3.8-27b-4gpu"))}
    bad = {what: line.fix for what, line in lines.items() if not line.ok}
    assert any("model Qwen/Qwen3.8-27B" in what for what in bad)
    assert bad["E2B_API_KEY is set"] == "export E2B_API_KEY=…"
    assert lines["LLM_API_KEY is set"].ok
    assert "marked-secret-value" not in json.dumps([line.model_dump() for line in lines.values()])
