"""Errors that a person can act on. The CLI prints the sentence, without a traceback, and exits with the code."""

from __future__ import annotations


class UserError(ValueError):
    """Bad usage or configuration: exit 2. The message says what, where, what is allowed and how to fix it."""

    exit_code = 2


class WorkFailed(RuntimeError):
    """The work itself failed: exit 1. The message says which part, the last lines of its log, and what was kept."""

    exit_code = 1
