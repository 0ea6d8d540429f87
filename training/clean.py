"""Delete old versions and runs under output/. What was paid for or is in service lives elsewhere and is never touched."""

from __future__ import annotations

import shutil
from pathlib import Path

from configs.files import exclusive
from configs.profile import Profile
from configs.run import EVENTS, Layout
from training.checkpoints import versions


def clean(profile: Profile, *, keep: int, dry_run: bool) -> list[Path]:
    """Delete all but the `keep` newest versions of each step and the `keep` newest runs; returns what went (or would go).

    Raises `UserError` while a run holds the output folder. Only folders of our own shape are looked at: a foreign file stays.
    """
    layout = Layout(profile)
    if not layout.output.is_dir():
        return []
    gone: list[Path] = []
    for parent in sorted({path.parent for depth in ("*", "*/*") for path in layout.output.glob(f"{depth}/v*-*")}):
        gone += reversed(versions(parent)[keep:])
    runs = sorted((p.parent for p in layout.output.glob(f"*/{EVENTS}")), key=lambda p: p.stat().st_mtime)
    gone += runs[: max(0, len(runs) - keep)]
    if gone and not dry_run:
        with exclusive(layout.lock, str(layout.output)):
            for path in gone:
                shutil.rmtree(path)
    return gone
