"""Backends by name. Each is imported when it is asked for, so that none needs another's libraries."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from configs.errors import UserError
from sandboxes.base import Backend

if TYPE_CHECKING:
    from configs.profile import Sandboxes

BACKENDS: Final = {
    "local": ("sandboxes.local", "LocalBackend"),
    "e2b": ("sandboxes.e2b", "E2BBackend"),
    "mock": ("sandboxes.mock", "MockBackend"),
}
"""Name → module and class."""

OPTIONS: Final = {"local": ("network", "memory_mb"), "e2b": ("template", "domain", "network"), "mock": ()}
"""Which fields of a profile's `sandboxes` section each backend takes."""


def make_backend(name: str, **options: Any) -> Backend:
    """The backend called `name` with its own options. Raises `UserError` listing the names."""
    if name not in BACKENDS:
        raise UserError(f"Unknown sandbox backend {name!r}; choose one of: {', '.join(BACKENDS)}.")
    module, kind = BACKENDS[name]
    backend: Backend = getattr(import_module(module), kind)(**options)
    return backend


def make_for(section: Sandboxes) -> Backend:
    """The backend that a profile's `sandboxes` section describes."""
    return make_backend(section.backend, **{field: getattr(section, field) for field in OPTIONS[section.backend]})
