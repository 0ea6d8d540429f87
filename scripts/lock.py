"""Remake scripts/locks/ from pyproject.toml, with hashes and without index addresses: `.venv/bin/python scripts/lock.py [NAME …] [--upgrade]`.

Versions that are already locked stay unless `--upgrade` is given. Needs the network and `uv`, which set-up brings. Only uv's own
settings count here, so that a local mirror with fewer files than the index does not thin out the hashes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from installer import LOCKS, ROOT

CPU: Final = ["--override", str(LOCKS / "overrides-cpu.txt"), "--no-emit-package", "torch"]
TARGETS: Final[dict[str, list[str]]] = {
    "tools": ["--group", "pyproject.toml:tools"],
    "control": ["--extra", "control", "--extra", "dev"],
    "train-cpu": ["--extra", "train-cpu", *CPU],
    "train-gpu": ["--extra", "train-gpu"],
}
"""Lock → what is compiled into it. torch is not in the CPU lock: its hash differs between the sources that a caller may have."""

WITHOUT_VLLM: Final = {
    "train-cpu": ["--extra", "train", *CPU],
    "train-gpu": ["--extra", "train", "--extra", "train-gpu-extras"],
}
"""Lock → what of it is installed without `--with-vllm`; only the names are written, the versions are those of the lock."""


def compile_extras(options: list[str], lock: Path, *more: str) -> str:
    """`uv pip compile` for Linux and Python 3.11; exits with uv's own words where it cannot."""
    command = [str(Path(sys.prefix) / "bin" / "uv"), "pip", "compile", *options, *more, "--no-header", "--quiet"]
    if "--group" not in options:
        command.append("pyproject.toml")
    common = [
        "--python-version",
        "3.11",
        "--python-platform",
        "linux",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--no-annotate",
    ]
    done = subprocess.run(
        [*command, *common, "--output-file", str(lock)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{lock.name}: {done.stderr.strip()}")
    return lock.read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(TARGETS)}; default all")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    arguments = parser.parse_args()
    for name in arguments.names or TARGETS:
        lock = LOCKS / f"{name}.lock"
        more = ["--generate-hashes", *(["--upgrade"] if arguments.upgrade else [])]
        text = compile_extras(TARGETS[name], lock, *more)
        print(f"{lock.name}: {len(re.findall(r'(?m)^[a-z0-9]', text))} packages")
        if name in WITHOUT_VLLM:
            base = LOCKS / f"{name}.base"
            pins = compile_extras(WITHOUT_VLLM[name], base, "--constraint", str(lock))
            names = re.findall(r"(?m)^([a-z0-9][a-z0-9._-]*)==", pins)
            base.write_text("\n".join(names) + "\n", encoding="utf-8")
            print(f"{base.name}: {len(names)} of them without vllm")


if __name__ == "__main__":
    main()
