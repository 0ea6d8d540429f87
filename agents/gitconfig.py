"""A git configuration without what makes git run a program (`core.fsmonitor`, `core.hooksPath`, aliases, filters, includes…)."""

from __future__ import annotations

import re
from typing import Final

ALLOWED: Final[dict[str, frozenset[str]]] = {
    "core": frozenset({"repositoryformatversion", "filemode", "bare", "logallrefupdates", "ignorecase", "symlinks"}),
    "extensions": frozenset({"objectformat"}),
    "user": frozenset({"name", "email"}),
    "remote": frozenset({"url", "fetch"}),
    "branch": frozenset({"remote", "merge"}),
}
"""Section → keys that are kept: what describes a repository. git has too many keys that run programs to list those instead."""

_SECTION: Final = re.compile(r'\[([A-Za-z]+)(?: "[^"\\\]]*")?\]')
_ENTRY: Final = re.compile(r"([A-Za-z]+) *= *[^\\]*")


def harmless(config: bytes) -> bytes:
    """The lines of a git configuration that are allowed. A spelling that this does not know is left out."""
    kept: list[str] = []
    allowed: frozenset[str] = frozenset()
    for line in config.decode("utf-8", "replace").split("\n"):
        section, entry = _SECTION.fullmatch(line.strip()), _ENTRY.fullmatch(line.strip())
        if section:
            allowed = ALLOWED.get(section[1].lower(), frozenset())
            if allowed:
                kept.append(line.strip())
        elif "[" in line.partition("=")[0]:
            allowed = frozenset()  # a section written in another way: nothing of it can be trusted
        elif entry and entry[1].lower() in allowed:
            kept.append("\t" + line.strip())
    return "".join(f"{line}\n" for line in kept).encode()
