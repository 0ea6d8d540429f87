"""How a function of another library is replaced: only when its source is the one that was tested, and once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from configs.errors import UserError

MARK: Final = "_agentexecutor"
"""Attribute of a function that is already ours."""


def expect(source: Any, *pieces: str) -> None:
    """Raise `UserError` unless every piece stands in the source of `source`."""
    text = inspect.getsource(source)
    missing = [piece for piece in pieces if piece not in text]
    if missing:
        raise UserError(
            f"ms-swift's {source.__qualname__} is not the one that was tested (no {missing[0]!r} in it); reinstall it from the lock."
        )


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> str:
    """Replace `owner.name` by `make(original)` once."""
    original = getattr(owner, name)
    if getattr(original, MARK, False):
        return "already there"
    ours = functools.wraps(original)(make(original)) if inspect.isfunction(original) else make(original)
    setattr(ours, MARK, True)
    setattr(owner, name, ours)
    return "applied"
