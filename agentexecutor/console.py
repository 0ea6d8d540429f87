"""What a person or a machine sees of a command: progress, results, errors."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic takes a third of a second, which `--help` does not have
    from configs.manifest import StepResult
    from configs.profile import Profile
    from configs.run import Progress, Run


@contextmanager
def reporter(as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """A progress sink: a live bar with time left on a terminal, a line every ten seconds elsewhere, JSON lines on stderr for machines."""
    if as_json:
        yield lambda p: print(
            json.dumps({"progress": p.step, "done": p.done, "total": p.total, "note": p.note, **p.metrics}),
            file=sys.stderr,
            flush=True,
        )
    elif sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield _Lines()


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        known: dict[str, TaskID] = {}

        def show(p: Progress) -> None:
            if p.step not in known:
                known[p.step] = bars.add_task(p.step, total=None, note="")
            bars.update(known[p.step], completed=p.done, total=p.total or None, note=_words(p))

        yield show


class _Lines:
    """One line at a step's first word, at its end, and every ten seconds between."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.shown: dict[str, float] = {}

    def __call__(self, p: Progress) -> None:
        now = time.monotonic()
        first = self.started.setdefault(p.step, now)
        if now - self.shown.get(p.step, -10.0) < 10 and not (p.total and p.done >= p.total):
            return
        self.shown[p.step] = now
        left = f", about {(now - first) / p.done * (p.total - p.done):.0f} s left" if p.total > p.done > 0 else ""
        of = f"{p.done}/{p.total}" if p.total else f"{p.done}" if p.done else "…"
        print(f"{p.step:<11} {of}  {_words(p)}{left}", file=sys.stderr, flush=True)


def _words(p: Progress) -> str:
    figures = "  ".join(f"{name} {value:.4g}" for name, value in p.metrics.items())
    return "  ".join(part for part in (p.note, figures) if part)


@contextmanager
def running(profile: Profile, as_json: bool, force: frozenset[str] = frozenset()) -> Iterator[Run]:
    """A run with progress shown; the effective profile is printed first and stored with the output."""
    from configs.run import new_run

    with reporter(as_json) as report:
        run = new_run(profile, report=report, force=force)
        if not as_json:
            print((run.folder / "profile.yaml").read_text(), file=sys.stderr)
            print(f"run {run.run_id}, stored in {run.folder}", file=sys.stderr)
        yield run


def show(result: StepResult, as_json: bool) -> None:
    """A step's result: one line of what happened, then its summary and files."""
    if as_json:
        print(result.model_dump_json())
        return
    state = "reused" if result.reused else "done"
    print(f"{result.step}: {state} ({result.why}), {result.seconds:.0f} s")
    for key, value in result.summary.items():
        print(f"  {key}: {_plain(value)}")
    for name, path in result.outputs.items():
        print(f"  {name} → {path}")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def emit(value: Any, as_json: bool, text: str) -> None:
    """Print `value` as JSON for machines or `text` for people."""
    print(json.dumps(value, ensure_ascii=False, default=str) if as_json else text)


def end_on_sigterm() -> None:
    """Make SIGTERM unwind like Ctrl-C, so that children and sandboxes are ended on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` leaves SIGINT ignored


def show_pipeline(run: Run, results: list[StepResult], as_json: bool) -> None:
    """The end of `all`: every step, whether it was run or reused and why, the verdicts, where the report lies, and where the time went."""
    from training.times import of_run, text

    if as_json:
        print(
            json.dumps({"run": run.run_id, "steps": [r.model_dump(mode="json") for r in results]}, ensure_ascii=False)
        )
        return
    for result in results:
        print(f"{result.step:<11} {'reused' if result.reused else 'done':<7} {result.seconds:7.1f} s  {result.why}")
    for result in results:
        if "markdown" in result.outputs:
            print("\n" + result.outputs["markdown"].read_text())
            print(f"report: {result.outputs['html'].absolute().as_uri()}")
    print("\nWhere the time went (minutes:seconds)\n" + text(*of_run(run, results)))
