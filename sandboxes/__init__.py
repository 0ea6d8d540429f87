"""Where commands run: one protocol, and the backends `local` (bubblewrap), `e2b` (cloud) and `mock` (in memory)."""

from sandboxes.base import (
    WORKSPACE,
    Backend,
    ExecResult,
    FileRefused,
    Sandbox,
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SandboxUnavailable,
)
from sandboxes.pool import SandboxPool
from sandboxes.registry import make_backend, make_for

__all__ = [
    "WORKSPACE",
    "Backend",
    "ExecResult",
    "FileRefused",
    "Sandbox",
    "SandboxError",
    "SandboxGone",
    "SandboxPool",
    "SandboxTimeout",
    "SandboxUnavailable",
    "make_backend",
    "make_for",
]
