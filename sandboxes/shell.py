"""The few commands that the mock sandbox really carries out, over a dictionary of files. Everything else is refused with exit 127."""

from __future__ import annotations

import re
from collections.abc import Callable
from posixpath import dirname, join, normpath
from typing import Final

Files = dict[str, bytes | str | None]
Result = tuple[int, bytes, bytes]

TOKEN: Final = re.compile(
    r"""[ \t]+|(?P<operator>&&|\|\||>>|[;>\n])|(?P<word>(?:'[^'\0]*'|"[^"$`\\\0]*"|[A-Za-z0-9_./,:=+@%^-]|[^\x00-\x7f])+)"""
)
"""What is understood. A command that does not match as a whole (expansions, pipes, subshells, globs) is refused rather than done wrongly."""

QUOTED: Final = re.compile(r"""'([^']*)'|"([^"]*)\"""")


def absolute(cwd: str, path: str) -> str:
    """`path` without `.`, `..` and doubled slashes."""
    return "/" + normpath(join(cwd, path)).lstrip(
        "/"
    )  # POSIX gives exactly two leading slashes a meaning, and normpath keeps them


def tokens(command: str) -> list[tuple[str, bool]] | None:
    """(text, is an operator) for each token, quotes removed; None when the command goes beyond `TOKEN`."""
    found, position = [], 0
    while position < len(command):
        match = TOKEN.match(command, position)
        if match is None:
            return None
        if operator := match["operator"]:
            found.append((";" if operator == "\n" else operator, True))
        elif word := match["word"]:
            found.append((QUOTED.sub(lambda quoted: quoted[1] or quoted[2] or "", word), False))
        position = match.end()
    return found


class Shell:
    """Runs `a && b ; c` of simple commands with `>`, `>>` redirections."""

    def __init__(self, files: Files, cwd: str) -> None:
        self.files, self.cwd = files, cwd
        self.commands: dict[str, Callable[[list[str]], Result]] = {
            "true": lambda _: (0, b"", b""),
            ":": lambda _: (0, b"", b""),
            "false": lambda _: (1, b"", b""),
            "pwd": lambda _: (0, self.cwd.encode() + b"\n", b""),
            "echo": self.echo,
            "cat": self.cat,
            "ls": self.ls,
            "mkdir": self.mkdir,
            "rm": self.rm,
            "cd": self.cd,
            "test": self.test,
        }

    def run(self, command: str) -> Result:
        """Exit code, stdout and stderr."""
        found = tokens(command)
        if found is None:
            return self._cannot(command)
        code, out, err, skip = 0, b"", b"", False
        simple: list[tuple[str, bool]] = []
        for token in [*found, (";", True)]:
            if not token[1] or token[0] in (">", ">>"):
                simple.append(token)
                continue
            if simple and not skip:
                code, more, complaint = self._simple(simple)
                out, err = out + more, err + complaint
            skip = (token[0] == "&&" and code != 0) or (token[0] == "||" and code == 0)
            simple = []
        return code, out, err

    def _cannot(self, command: str) -> Result:
        return 127, b"", f"mock: cannot run: {command}\n".encode("utf-8", "replace")

    def _simple(self, parts: list[tuple[str, bool]]) -> Result:
        target, append = None, False
        if len(parts) > 2 and parts[-2][1]:
            target, append, parts = self._path(parts[-1][0]), parts[-2][0] == ">>", parts[:-2]
        words = [text for text, _ in parts]
        if any(operator for _, operator in parts) or words[0] not in self.commands:
            return self._cannot(" ".join(words))
        code, out, err = self.commands[words[0]](words[1:])
        if target is None:
            return code, out, err
        old = self.files.get(target, b"")
        if not isinstance(old, bytes) or self.files.get(dirname(target), b"") is not None:
            return 1, b"", f"bash: {target}: No such file or directory\n".encode("utf-8", "replace")
        self.files[target] = old + out if append else out
        return code, b"", err

    def _path(self, name: str) -> str:
        return absolute(self.cwd, name)

    def echo(self, words: list[str]) -> Result:
        newline = words[:1] != ["-n"]
        return 0, " ".join(words if newline else words[1:]).encode("utf-8", "surrogateescape") + b"\n" * newline, b""

    def cat(self, words: list[str]) -> Result:
        out = b""
        for word in words:
            data = self.files.get(self._path(word))
            if not isinstance(data, bytes):
                return (
                    1,
                    out,
                    f"cat: {word}: {'Is a directory' if self._path(word) in self.files else 'No such file or directory'}\n".encode(),
                )
            out += data
        return 0, out, b""

    def ls(self, words: list[str]) -> Result:
        folder = self._path(words[0] if words else ".")
        if folder not in self.files:
            return 2, b"", f"ls: cannot access '{words[0]}': No such file or directory\n".encode()
        if self.files[folder] is not None:
            return 0, words[0].encode() + b"\n", b""
        names = sorted(
            path.rpartition("/")[2]
            for path in self.files
            if path != "/" and dirname(path) == folder and not path.rpartition("/")[2].startswith(".")
        )
        return 0, "".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape"), b""

    def mkdir(self, words: list[str]) -> Result:
        parents = "-p" in words
        for word in [word for word in words if word != "-p"]:
            path = self._path(word)
            if path in self.files and not (parents and self.files[path] is None):
                return 1, b"", f"mkdir: cannot create directory '{word}': File exists\n".encode()
            missing = []
            while path not in self.files:
                missing.append(path)
                path = dirname(path)
            if self.files[path] is not None:
                return 1, b"", f"mkdir: cannot create directory '{word}': Not a directory\n".encode()
            if len(missing) > 1 and not parents:
                return 1, b"", f"mkdir: cannot create directory '{word}': No such file or directory\n".encode()
            self.files.update(dict.fromkeys(reversed(missing)))
        return 0, b"", b""

    def rm(self, words: list[str]) -> Result:
        flags = "".join(word for word in words if word.startswith("-"))
        for word in [word for word in words if not word.startswith("-")]:
            path = self._path(word)
            if path not in self.files:
                if "f" not in flags:
                    return 1, b"", f"rm: cannot remove '{word}': No such file or directory\n".encode()
                continue
            if self.files[path] is None and "r" not in flags:
                return 1, b"", f"rm: cannot remove '{word}': Is a directory\n".encode()
            for name in [name for name in self.files if name == path or name.startswith(path.rstrip("/") + "/")]:
                del self.files[name]
        return 0, b"", b""

    def cd(self, words: list[str]) -> Result:
        path = self._path(words[0] if words else "/tmp")
        if self.files.get(path, b"") is not None:
            return 1, b"", f"bash: cd: {words[0]}: No such file or directory\n".encode()
        self.cwd = path
        return 0, b"", b""

    def test(self, words: list[str]) -> Result:
        kinds: dict[str, Callable[[str], bool]] = {
            "-e": lambda path: path in self.files,
            "-f": lambda path: isinstance(self.files.get(path), bytes),
            "-d": lambda path: path in self.files and self.files[path] is None,
        }
        if len(words) != 2 or words[0] not in kinds:
            return self._cannot("test " + " ".join(words))
        return (0 if kinds[words[0]](self._path(words[1])) else 1), b"", b""
