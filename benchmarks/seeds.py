"""`python -m benchmarks.seeds`: the whole loop once a seed, one after the other, and docs/results.md from what lies there.

Each seed is `python -m agentexecutor all` with an output and a data folder of its own. Killed anywhere, the same command goes on: every step is reused
when its own manifest proves it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentexecutor.console import end_on_sigterm
from benchmarks.document import DECLARED, publish
from benchmarks.recorded import (
    STARTS,
    digest,
    newest_manifests,
    profile_files,
    read_seed,
    read_starts,
    stored_profile,
    together,
)
from configs.errors import UserError, WorkFailed
from configs.files import write_atomic, write_json
from configs.load import ROOT, dump_profile, load_profile
from configs.profile import Profile
from training.launch import SECRET, Command
from training.supervise import spawn_child


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 every seed is in the document, 1 some failed or the work did, 2 bad usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", default="laptop", help="shipped profile or YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(DECLARED), help="one whole run each")
    parser.add_argument("--output-dir", type=Path, help="folder of the seeds' folders; default: output/seeds-<profile>")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "results.md", help="a .json lies beside it")
    parser.add_argument("--collect-only", action="store_true", help="run nothing; read the finished folders")
    given = parser.parse_args(argv)
    try:
        return _work(given.profile, sorted(set(given.seeds)), given.output_dir, given.document, not given.collect_only)
    except (UserError, WorkFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return 130


def _work(name: str, seeds: Sequence[int], output: Path | None, document: Path, start: bool) -> int:
    profile = load_profile(name)
    root = (output or profile.paths.output / f"seeds-{profile.name}").absolute()
    missing: dict[int, str] = {}
    found: list[dict[str, Any]] = []
    for seed in seeds:
        folder = root / f"seed-{seed}"
        try:
            if start:
                run_seed(profile, seed, folder)
        except WorkFailed as error:  # a UserError would meet every seed alike, and ends the benchmark
            missing[seed] = "its run failed"
            print(f"seed {seed} failed, the others go on: {error}", file=sys.stderr)
            continue
        try:
            found.append(read_seed(folder, seed))
        except UserError as error:
            missing[seed] = "it is not finished"
            print(f"seed {seed} is left out: {error}", file=sys.stderr)
    if not found:
        raise WorkFailed(f"no seed is finished below {root}; {document} is unchanged.")
    publish(document, together(found, missing))
    print(f"{document}: seeds {', '.join(str(seed['seed']) for seed in found)}")
    if missing:
        print(f"not in it: {', '.join(f'seed {seed} ({why})' for seed, why in missing.items())}", file=sys.stderr)
    return 1 if missing else 0


def run_seed(profile: Profile, seed: int, folder: Path) -> None:
    """Run `all` for one seed; what is finished is reused. Raises `WorkFailed` when it fails, `UserError` when the folder belongs to another recipe."""
    paths = {"output": folder, "data": folder / "data", "demo": folder / "demo"}  # never the repository's own bundle
    own = profile.model_copy(update={"seed": seed, "paths": profile.paths.model_copy(update=paths)})
    if profile_files(folder) and digest(stored_profile(folder, seed)) != digest(own):
        raise UserError(f"{folder}: was run with another profile; name an empty --output-dir, or delete it.")
    write_atomic(folder / "profile.yaml", dump_profile(own))
    argv = [sys.executable, "-m", "agentexecutor", "all", "--profile", str(folder / "profile.yaml")]
    command = Command(argv, secrets=tuple(name for name in os.environ if SECRET.search(name)))
    supervised(command, seed, folder)


def supervised(command: Command, seed: int, folder: Path) -> None:
    """Run one start of a seed and record its time and memory, unless it made nothing. Raises `WorkFailed`."""
    before, earlier = _made(folder), read_starts(folder)
    now: dict[str, Any] = {"minutes": None, "peak_gib": None, "hardware": hardware(), "commit": commit()}
    write_json(folder / STARTS, [*earlier, now])  # a start that is killed has been one
    with spawn_child(
        command,
        folder / "all.log",
        name=f"seed {seed}",
        on_line=lambda line: print(f"seed {seed}: {line}", file=sys.stderr, flush=True),
    ) as child:
        while (code := child.poll()) is None:
            time.sleep(0.5)
        now |= {"minutes": round(child.seconds / 60, 2), "peak_gib": round(child.peak_bytes / 2**30, 2)}
        unchanged = code == 0 and _made(folder) == before
        write_json(folder / STARTS, earlier if unchanged else [*earlier, now])
        if code:
            raise child.failed(f"failed with exit code {code}")


def _made(folder: Path) -> dict[str, str]:
    return {step: manifest.created for step, manifest in newest_manifests(folder).items()}


def hardware() -> str:
    """Cores that this process may use, the processor's name and the machine's memory, as the kernel says them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unnamed processor"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores, {name}, {memory:.0f} GiB"


def commit() -> str:
    """The checkout's commit, with `-dirty` where a tracked file differs; `unknown` without git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip()


if __name__ == "__main__":
    end_on_sigterm()
    raise SystemExit(main())
