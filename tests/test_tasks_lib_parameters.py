"""What a flow may be asked with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.errors import UserError
from configs.files import write_atomic
from configs.load import dump_profile, load_profile
from tasks_lib.parameters import KEYS, Overrides, opened


def test_every_override_names_a_key_that_profiles_have() -> None:
    assert set(KEYS) | {"epochs"} == set(Overrides.model_fields)
    for key in KEYS.values():
        section: object = load_profile("smoke", environ={})
        for part in key.split("."):
            assert hasattr(section, part), key
            section = getattr(section, part)


def test_overrides_lie_over_environment_and_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONCURRENCY", "3")
    monkeypatch.setenv("SAMPLES_PER_TASK", "5")
    with opened("smoke", Overrides(concurrency=2, output=tmp_path), None) as run:
        assert (run.profile.collect.concurrency, run.profile.collect.samples_per_task) == (2, 5)


def test_epochs_replace_the_profiles_steps(tmp_path: Path) -> None:
    with opened("smoke", Overrides(epochs=3, output=tmp_path), None) as run:
        assert (run.profile.sft.epochs, run.profile.sft.max_steps, run.profile.grpo.max_steps) == (3, None, None)


def test_a_part_of_a_run_takes_the_stored_profile_whatever_its_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("smoke", Overrides(concurrency=2, output=tmp_path), None) as whole:
        monkeypatch.setenv("CONCURRENCY", "9")
        with opened(None, Overrides(), whole.folder) as part:  # under the lock that the whole holds
            assert part.profile == whole.profile
            assert part.folder == whole.folder


def test_two_runs_on_one_output_never_mix(tmp_path: Path) -> None:
    with (
        opened("smoke", Overrides(output=tmp_path), None),
        pytest.raises(UserError, match="in use by process"),
        opened("smoke", Overrides(output=tmp_path), None),
    ):
        pass


def test_a_missing_key_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLM_API_KEY", raising=False)
    with (
        pytest.raises(UserError, match="LLM_API_KEY"),
        opened("smoke", Overrides(llm="deepseek-chat", output=tmp_path), None, teacher=True),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["llm_api_key", "LLM_API_KEY", "api_key", "token"])
def test_there_is_no_parameter_for_a_secret(field: str) -> None:
    with pytest.raises(ValidationError):
        Overrides.model_validate({field: "sk-1"})


def test_a_profile_file_works_as_well_as_a_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    write_atomic(
        file,
        dump_profile(
            load_profile("smoke", flags={"name": "mine", "paths.output": str(tmp_path / "output")}, environ={})
        ),
    )
    with opened(str(file), Overrides(), None) as run:
        assert run.profile.name == "mine"
