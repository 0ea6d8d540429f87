"""Which failures of a step are worth a second try: a table, and one function that walks it."""

from __future__ import annotations

from typing import Final

RETRIED: Final[dict[str, bool]] = {
    "configs.errors.UserError": False,  # the same mistake gives the same answer
    "configs.errors.WorkFailed": False,  # a trainer that failed fails again; its log says why
    "sandboxes.base.SandboxUnavailable": False,  # needs the user's hands
    "sandboxes.base.SandboxError": True,
    "tasks_lib.policy.Interrupted": True,
    "httpx.TransportError": True,
    "builtins.ConnectionError": True,
    "builtins.TimeoutError": True,
}
"""Qualified name of an error's class → whether the step is tried again. The most derived class that is listed decides; unlisted ones are not retried."""

RETRIES: Final = 2
"""Further tries of a step."""

RETRY_DELAYS_S: Final = (5.0, 30.0)
"""Pause before each, in seconds: one for a hiccup, one for a restart."""


class Interrupted(RuntimeError):
    """The step's process or its orchestrator vanished (crash, restart): nothing is known against the work itself, which resumes where it was."""


def transient(error: BaseException) -> bool:
    """Whether another try may succeed."""
    for kind in type(error).__mro__:
        verdict = RETRIED.get(f"{kind.__module__}.{kind.__qualname__}")
        if verdict is not None:
            return verdict
    return False
