"""What we parse is what ms-swift renders into training rows, character for character."""

from __future__ import annotations

import pytest

from tests.train_env import run_inside


@pytest.mark.slow  # 20 s: imports torch and ms-swift once
def test_tool_calls_are_ms_swifts_own() -> None:
    run_inside("test_agents_rendering.py")
