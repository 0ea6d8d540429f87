"""The report as one self-contained HTML page: no script, no style sheet, font or image from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from training.plots import Bar, line, rates
from training.report import tables

CURVES: Final = (
    ("loss", "loss", "loss"),
    ("reward", "reward", "mean reward of scored rollouts"),
    ("agent/pass_rate", "pass rate of the rollouts", "share of scored ones"),
    ("pass_rate", "pass rate on validation tasks", "share of scored ones"),
    ("entropy/mean", "entropy of the sampled tokens", "nats"),
    ("rollout_correction/k3_kl", "gap between trainer and sampler", "KL"),
    ("kl", "KL to the adapter it started from", "KL"),
)
"""Key of metrics.jsonl or probes.jsonl, what it is called, and its unit. `loss` is drawn for SFT alone: GRPO's says nothing about progress."""

STYLE: Final = """body{font:15px/1.5 system-ui,sans-serif;color:#1f2430;max-width:1000px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid #d5d9e0;padding:.3rem .7rem;text-align:left}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}.plots{display:flex;flex-wrap:wrap;gap:1rem}.note{color:#555d6d}.wide{overflow-x:auto}"""


def html(report: Mapping[str, Any], metrics: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """`metrics`: adapter name → the rows of its metrics.jsonl, where there is one."""
    plots = [
        rates(
            "Pass rate on held-out tasks", [Bar(p["name"], p["rate"], p["low"], p["high"]) for p in report["policies"]]
        )
    ]
    for name, steps in metrics.items():
        trained_by_reward = any("reward" in row for row in steps)
        for key, title, unit in CURVES:
            points = [(row["step"], row[key]) for row in steps if key in row]
            if points and not (key == "loss" and trained_by_reward):
                plots.append(line(f"{name}: {title}", points, y=unit if unit != title else ""))
    body = [f"<h1>Evaluation of {escape(report['model'])}</h1>", f"<p>{escape(report['headline'])}</p>"]
    body += ['<div class="plots">', *plots, "</div>", f'<p class="note">{escape(report["note"])}</p>']
    for title, header, rows in tables(report):
        body.append(f"<h2>{escape(title)}</h2>" + _table(header, rows))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Evaluation of {escape(report['model'])}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
