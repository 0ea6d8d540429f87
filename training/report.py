"""The report of an evaluation: figures from result rows (pure), and the same figures as Markdown. training/page.py makes the HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from training.results import PHASES, Row
from training.statistics import Count, paired, pass_at_k, pass_rate
from training.times import Spent, table

REPORT_VERSION: Final = 1

NOTE: Final = (
    "Pass rates count scored attempts only; an attempt that infrastructure spoiled is not scored and is in no denominator. "
    "Intervals are 95%, with the task as the unit (Wilson on the effective number of trials). "
    "Differences are over tasks that both policies were scored on; p is exact and two-sided (sign test over tasks, McNemar's for one attempt)."
)


def build(rows: Sequence[Row], policies: Sequence[str], attempts: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """The report as JSON. `policies` gives their order, `attempts` the episodes planned of each task; `about` is put first as it is."""
    counts = {policy: counts_of([r for r in rows if r.policy == policy]) for policy in policies}
    pairs = [(a, b) for i, a in enumerate(policies) for b in policies[:i]]
    return {
        **about,
        "report_version": REPORT_VERSION,
        "note": NOTE,
        "policies": [_policy(policy, [r for r in rows if r.policy == policy], attempts) for policy in policies],
        "differences": [{"policy": a, "against": b, **asdict(paired(counts[a], counts[b]))} for a, b in pairs],
    }


def counts_of(rows: Sequence[Row]) -> dict[str, Count]:
    """Task → its scored attempts and passes; a task without a scored attempt is there with zero."""
    return {
        task: Count(sum(r.passed for r in rows if r.task == task), sum(r.scored for r in rows if r.task == task))
        for task in dict.fromkeys(r.task for r in rows)
    }


def _policy(name: str, rows: Sequence[Row], attempts: int) -> dict[str, Any]:
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, attempts) if k <= attempts})
    counts = list(counts_of(rows).values())
    return {
        "name": name,
        **_rates(rows),
        "families": {
            family: _rates([r for r in rows if r.family == family]) for family in sorted({r.family for r in rows})
        },
        "pass_at_k": [asdict(pass_at_k(counts, k)) for k in ks],
        "stop_reasons": dict(sorted(Counter(r.stop_reason for r in rows).items())),
        "not_scored_reasons": dict(
            sorted(Counter(r.reason or "no reason given" for r in rows if not r.scored).items())
        ),
        "tool_calls": sum(r.calls for r in rows),
        "episodes_with_a_tool_call": sum(r.calls > 0 for r in rows),
        "turns": sum(r.turns for r in rows),
        "prompt_tokens": sum(r.prompt_tokens for r in rows),
        "completion_tokens": sum(r.completion_tokens for r in rows),
        "episode_seconds": {phase: round(sum(getattr(r, phase) for r in rows), 2) for phase in PHASES},
    }


def _rates(rows: Sequence[Row]) -> dict[str, Any]:
    counts = counts_of(rows)
    return {
        "tasks": len(counts),
        "episodes": len(rows),
        "not_scored": sum(not r.scored for r in rows),
        **asdict(pass_rate(list(counts.values()))),
    }


# --- the same figures as tables ---------------------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]
"""Title, header and rows of text."""


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The report as tables of text, for Markdown and for HTML alike."""
    policies: list[dict[str, Any]] = report["policies"]
    families = sorted({family for p in policies for family in p["families"]})
    reasons = sorted({reason for p in policies for reason in p["stop_reasons"]})
    found: list[Table] = [
        (
            "Pass rates",
            ["policy", "tasks", "attempts scored", "passes", "pass rate", "95% interval", "not scored"],
            [
                [
                    p["name"],
                    str(p["tasks"]),
                    str(p["attempts"]),
                    str(p["passes"]),
                    percent(p["rate"]),
                    interval(p),
                    str(p["not_scored"]),
                ]
                for p in policies
            ],
        ),
        (
            "Paired differences",
            ["difference", "tasks", "points", "95% interval", "better / worse", "exact p"],
            [_difference(d) for d in report["differences"]],
        ),
        (
            "By family",
            ["family", *[p["name"] for p in policies]],
            [[family, *[_family(p["families"].get(family)) for p in policies]] for family in families],
        ),
        (
            "Stop reasons",
            ["policy", *reasons],
            [[p["name"], *[str(p["stop_reasons"].get(reason, 0)) for reason in reasons]] for p in policies],
        ),
        (
            "pass@k",
            ["policy", *[f"k = {at['k']}" for at in policies[0]["pass_at_k"]]] if policies else ["policy"],
            [[p["name"], *[_at_k(at) for at in p["pass_at_k"]]] for p in policies],
        ),
        (
            "Not scored",
            ["policy", "reason", "episodes"],
            [[p["name"], reason, str(count)] for p in policies for reason, count in p["not_scored_reasons"].items()],
        ),
        ("Where the time went (minutes:seconds)", *table([Spent(**step) for step in report.get("time", [])])),
        (
            "Inside the episodes (seconds, summed over episodes that run at once)",
            ["policy", *PHASES, "tool calls", "completion tokens"],
            [
                [
                    p["name"],
                    *[f"{p['episode_seconds'][phase]:.1f}" for phase in PHASES],
                    str(p["tool_calls"]),
                    str(p["completion_tokens"]),
                ]
                for p in policies
            ],
        ),
    ]
    return [table for table in found if table[2]]


def markdown(report: Mapping[str, Any]) -> str:
    """The report for a terminal, a pull request or a Prefect artifact."""
    parts = [f"# Evaluation of {report['model']}", report["headline"], report["note"]]
    for title, header, rows in tables(report):
        lines = [_line(header), _line(["---"] * len(header)), *(_line(row) for row in rows)]
        parts.append(f"## {title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def headline(policies: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: every policy's passes, and what was not scored."""
    said = "; ".join(f"{p['name']} passed {p['passes']} of {p['attempts']} ({percent(p['rate'])})" for p in policies)
    lost = sum(p["not_scored"] for p in policies)
    return f"{said}." + (f" Not scored, and in no denominator: {lost}." if lost else "")


def percent(rate: float | None) -> str:
    return "undefined" if rate is None else f"{100 * rate:.1f}%"


def interval(p: Mapping[str, Any]) -> str:
    return "undefined" if p["low"] is None else f"{100 * p['low']:.1f}–{100 * p['high']:.1f}%"


def points(difference: float | None) -> str:
    return "undefined" if difference is None else f"{100 * difference:+.1f}"


def _difference(d: Mapping[str, Any]) -> list[str]:
    between = "undefined" if d["low"] is None else f"{100 * d['low']:+.1f} to {100 * d['high']:+.1f}"
    who = f"{d['policy']} − {d['against']}"
    return [
        who,
        str(d["tasks"]),
        points(d["difference"]),
        between,
        f"{d['better']} / {d['worse']}",
        f"{d['p_value']:.2g}",
    ]


def _family(f: Mapping[str, Any] | None) -> str:
    if f is None:
        return "–"
    lost = f", {f['not_scored']} not scored" if f["not_scored"] else ""
    return f"{f['passes']}/{f['attempts']} ({interval(f)}{lost})"


def _at_k(at: Mapping[str, Any]) -> str:
    if at["value"] is None:
        return f"undefined (no task has {at['k']} scored attempts)"
    return percent(at["value"]) + (f" (undefined for {at['undefined']} tasks)" if at["undefined"] else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
