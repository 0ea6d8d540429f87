"""The table of where the time of a run went."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentexecutor.console import show_pipeline
from configs.load import load_profile
from configs.manifest import StepResult
from configs.run import new_run
from training.times import Spent, minutes, table, text


def test_every_second_of_the_run_has_a_place_in_the_table() -> None:
    steps = [
        Spent("sft", 100.0, {"start-up": 40.0, "training": 50.0}, 4.25),
        Spent("grpo", 200.0, {"start-up": 20.0, "generation": 120.0, "validation": 30.0}),
        Spent("infer", 60.0, {}),
    ]
    header, rows = table(steps, 400.0)
    assert header == [
        "step",
        "start-up",
        "generation",
        "training",
        "validation",
        "other",
        "total",
        "share",
        "peak memory",
    ]
    assert rows == [
        ["sft", "0:40", "–", "0:50", "–", "0:10", "1:40", "25%", "4.2 GiB"],
        ["grpo", "0:20", "2:00", "–", "0:30", "0:30", "3:20", "50%", "–"],
        ["infer", "–", "–", "–", "–", "–", "1:00", "15%", "–"],
        ["between the steps", "–", "–", "–", "–", "–", "0:40", "10%", "–"],
        ["in all", "1:00", "2:00", "0:50", "0:30", "–", "6:40", "100%", "–"],
    ]
    assert {len(line.rstrip()) for line in text(header, rows).splitlines()[1:2]} == {
        len("between the steps") + sum(2 + max(len(header[i]), *(len(r[i]) for r in rows)) for i in range(1, 9))
    }


def test_a_reused_step_shows_what_it_took_and_takes_nothing_of_this_run() -> None:
    steps = [Spent("sft", 100.0, {"training": 100.0}, reused=True), Spent("grpo", 50.0, {"training": 50.0})]
    _, rows = table(steps, 60.0)
    assert rows[0][0] == "sft (reused)"
    assert [row[-3:-1] for row in rows] == [["1:40", "–"], ["0:50", "83%"], ["0:10", "17%"], ["1:00", "100%"]]
    assert rows[-1][1] == "0:50"


def test_the_end_of_all_shows_the_report_as_a_link_and_where_the_time_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(load_profile("smoke", environ={}, flags={"paths.output": str(tmp_path)}))
    (tmp_path / "report.md").write_text("# Evaluation\n")
    outputs = {"markdown": tmp_path / "report.md", "html": tmp_path / "report.html"}
    took = {"time": {"start-up": 30.0, "generation": 90.0}, "peak_memory_gib": 5.0}
    evaluated = StepResult(step="evaluate", folder=tmp_path, outputs=outputs, digest="", summary=took, seconds=125.0)
    show_pipeline(run, [evaluated], as_json=False)
    said = capsys.readouterr().out
    assert f"report: {(tmp_path / 'report.html').as_uri()}" in said
    last = said[said.index("Where the time went") :].splitlines()[1:]
    assert [line.split() for line in last[:2]] == [
        ["step", "start-up", "generation", "other", "total", "share", "peak", "memory"],
        ["evaluate", "0:30", "1:30", "0:05", "2:05", "100%", "5.0", "GiB"],
    ]


def test_nothing_known_is_no_row_and_a_minute_is_never_sixty_seconds() -> None:
    assert table([])[1] == []
    assert (minutes(59.6), minutes(3601)) == ("1:00", "60:01")
