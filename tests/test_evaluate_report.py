"""The report: every figure from the rows, nothing scored that was not, and the same figures in JSON, Markdown and HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from training.page import html
from training.plots import Bar, line, rates, ticks_of
from training.report import build, headline, markdown
from training.results import Row, read_results, write_results


def row(
    policy: str,
    task: str,
    verdict: str,
    *,
    family: str = "edit",
    attempt: int = 0,
    stop: str = "finished",
    reason: str = "",
) -> Row:
    return Row(
        policy,
        task,
        f"digest-{task}",
        family,
        attempt,
        verdict,
        reason,
        stop,
        1.5,
        100,
        20,
        2,
        1,
        1,
        0.1,
        0.2,
        0.7,
        0.3,
        0.1,
        0.1,
    )


ROWS = [
    row("base", "a", "failed", stop="max_turns"),
    row("base", "b", "failed"),
    row("base", "c", "not_scored", stop="infra_error", reason="sandbox: gone", family="script"),
    row("sft", "a", "passed"),
    row("sft", "b", "failed"),
    row("sft", "c", "passed", family="script"),
]


TOOK = {"step": "sft training", "seconds": 90.0, "phases": {"training": 60.0}, "peak_memory_gib": 2.25, "reused": False}


def report(rows: list[Row] = ROWS, policies: tuple[str, ...] = ("base", "sft"), attempts: int = 1) -> dict[str, Any]:
    made = build(rows, policies, attempts, {"model": "small & <random>", "time": [TOOK]})
    return {**made, "headline": headline(made["policies"])}


def test_a_not_scored_attempt_is_in_no_denominator_and_is_shown_apart() -> None:
    """BEHAVIOURS 30."""
    base, sft = report()["policies"]
    assert (base["attempts"], base["passes"], base["not_scored"], base["rate"]) == (2, 0, 1, 0.0)
    assert (sft["attempts"], sft["passes"], sft["not_scored"]) == (3, 2, 0)
    assert base["families"]["script"]["rate"] is None
    assert base["not_scored_reasons"] == {"sandbox: gone": 1}
    (pair,) = report()["differences"]
    assert (pair["policy"], pair["against"], pair["tasks"], pair["difference"]) == ("sft", "base", 2, 0.5)
    text = markdown(report())
    assert "| base | 3 | 2 | 0 | 0.0% |" in text
    assert "Not scored, and in no denominator: 1." in text
    assert "| base | sandbox: gone | 1 |" in text
    assert "0/0 (undefined, 1 not scored)" in text


def test_pass_at_k_with_fewer_scored_attempts_than_k_is_said_to_be_undefined() -> None:
    """BEHAVIOURS 30."""
    rows = [
        row("base", "a", "passed", attempt=0),
        row("base", "a", "failed", attempt=1),
        row("base", "b", "failed", attempt=0),
    ]
    rows.append(row("base", "b", "not_scored", attempt=1, stop="infra_error"))
    (base,) = report(rows, ("base",), 2)["policies"]
    assert [(at["k"], at["value"], at["undefined"]) for at in base["pass_at_k"]] == [(1, 0.25, 0), (2, 1.0, 1)]
    assert "100.0% (undefined for 1 tasks)" in markdown(report(rows, ("base",), 2))
    assert "undefined (no task has 4 scored attempts)" in markdown(report(rows, ("base",), 4))


def test_every_pair_of_policies_is_compared_the_later_one_against_the_earlier() -> None:
    rows = [*ROWS, row("grpo", "a", "passed")]
    assert [(d["policy"], d["against"]) for d in report(rows, ("base", "sft", "grpo"))["differences"]] == [
        ("sft", "base"),
        ("grpo", "base"),
        ("grpo", "sft"),
    ]


def test_a_policy_without_a_scored_attempt_has_no_rate_anywhere() -> None:
    rows = [row("base", "a", "not_scored"), row("sft", "a", "passed")]
    made = report(rows)
    assert made["policies"][0]["rate"] is None
    assert made["differences"][0]["difference"] is None
    assert "base passed 0 of 0 (undefined)" in made["headline"]
    json.dumps(made, allow_nan=False)
    assert "not scored" in html(made, {})


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [(name, value) for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_the_page_needs_nothing_from_anywhere_else_and_escapes_what_it_shows() -> None:
    metrics = {
        "sft": [{"step": 1.0, "loss": 2.0}, {"step": 2.0, "loss": 1.0}],
        "grpo": [{"step": 1.0, "loss": 0.0, "reward": 0.4}],
    }
    page = html(report(), metrics)
    links = Links()
    links.feed(page)
    assert not links.found
    assert "script" not in links.tags
    assert links.tags.count("svg") == 3
    assert not re.search(r"url\(|@import", page)
    assert "small &amp; &lt;random&gt;" in page
    assert "sft: loss" in page
    assert "grpo: reward" in page
    assert "grpo: loss" not in page


def test_results_come_back_from_parquet_as_they_were(tmp_path: Path) -> None:
    write_results(tmp_path / "results.parquet", ROWS)
    assert read_results(tmp_path / "results.parquet") == ROWS
    write_results(tmp_path / "results.parquet", [])
    assert read_results(tmp_path / "results.parquet") == []


def test_a_cut_results_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.parquet"
    write_results(file, ROWS)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"results\.parquet: is no evaluation result"):
        read_results(file)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_the_ticks_of_an_axis_hold_every_value_and_are_few(low: float, width: float) -> None:
    ticks = ticks_of(low, low + width)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-9 * abs(low)
    assert ticks[-1] >= low + width - 1e-9 * abs(low + width)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=8))
def test_a_plot_of_any_numbers_holds_finite_coordinates_only(points: list[tuple[float, float]]) -> None:
    small = [(a, b) for a, b in points if not (abs(a) > 1e100 or abs(b) > 1e100)]
    drawn = line("a < b & c", small, y='"')
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', drawn)
    ElementTree.fromstring(drawn)


def test_a_bar_without_a_rate_is_a_gap_and_not_a_zero() -> None:
    drawn = rates("t", [Bar("base", None, None, None), Bar("sft", 0.0, 0.0, 0.3)])
    ElementTree.fromstring(drawn)
    assert drawn.count("<rect") == 1
    assert "not scored" in drawn
