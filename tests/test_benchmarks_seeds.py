"""The benchmark over seeds: pooled statistics by hand and by property, and a document that is nothing but its data. Results are made up, in files."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.document import BEGIN, END, TEMPLATE, filled
from benchmarks.pooled import mean_interval, pooled, spread, t_quantile, within
from benchmarks.recorded import STARTS, read_starts
from benchmarks.seeds import main, run_seed, supervised
from configs.errors import UserError, WorkFailed
from configs.load import ROOT, dump_profile, load_profile
from configs.manifest import run_step
from configs.profile import Profile
from configs.run import Layout
from training.launch import Command
from training.results import Row, write_results
from training.statistics import Count

light = settings(max_examples=50, deadline=None)  # a clock says nothing of a formula where two cores are shared

Grid = list[list[int]]
"""Verdicts by seed, then task."""


def counts(grid: Grid) -> list[dict[str, Count]]:
    return [{f"t{i}": Count(passed, 1) for i, passed in enumerate(seed)} for seed in grid]


grids = st.tuples(st.integers(1, 6), st.integers(1, 12)).flatmap(
    lambda size: st.tuples(
        *[st.lists(st.lists(st.integers(0, 1), min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0])]
        * 2
    )
)

# --- statistics ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("df", "t"),
    [(1, 12.706204736), (2, 4.302652730), (4, 2.776445105), (5, 2.570581836), (47, 2.011740514), (191, 1.972461990)],
)
def test_students_quantile_equals_scipys(df: int, t: float) -> None:
    assert t_quantile(df) == pytest.approx(t, abs=1e-8)


@light
@given(st.integers(1, 60), st.floats(0, 20), st.floats(0, 20))
def test_the_distribution_of_t_rises_from_nothing_to_one(df: int, one: float, two: float) -> None:
    assert within(0.0, df) == 0.0
    assert 0.0 <= within(min(one, two), df) <= within(max(one, two), df) + 1e-12 <= 1.0 + 2e-12


def test_the_pooled_difference_is_the_one_worked_out_by_hand() -> None:
    """Differences by seed and task: (1, 1, 0, 0) and (1, 0, 0, -1). Tasks 1, ½, 0, -½: variance 5/12, over 4; seeds ½, 0: 1/8, over 2; cells:
    mean ¼, squares 4 - 8/16, over 7, over 8. Both: 5/48 + 1/16 - 1/16 = 5/48, with one degree of freedom."""
    found = pooled(counts([[1, 1, 1, 0], [1, 1, 0, 0]]), counts([[0, 0, 1, 0], [0, 1, 0, 1]]))
    assert (found.over_tasks.value, found.over_seeds.value, found.over_both.value) == (0.25, 0.25, 0.25)
    half = 3.182446305 * (5 / 48) ** 0.5
    assert (found.over_tasks.low, found.over_tasks.high) == pytest.approx((0.25 - half, min(1, 0.25 + half)), abs=1e-8)
    assert (found.over_seeds.low, found.over_seeds.high) == (-1.0, 1.0)  # 12.7 × 1/4 beyond what is possible
    assert (found.over_both.low, found.over_both.high, found.over_both.units) == (-1.0, 1.0, 2)
    assert (found.won, found.tied, found.lost, found.better, found.worse) == (1, 1, 0, 2, 1)
    assert (found.seeds_p, found.tasks_p) == (1.0, 1.0)


@light
@given(grids)
def test_the_other_way_round_is_the_negative(pair: tuple[Grid, Grid]) -> None:
    one, two = pooled(counts(pair[0]), counts(pair[1])), pooled(counts(pair[1]), counts(pair[0]))
    assert (one.won, one.tied, one.lost, one.better, one.worse) == (two.lost, two.tied, two.won, two.worse, two.better)
    assert (one.seeds_p, one.tasks_p) == (two.seeds_p, two.tasks_p)
    for a, b in ((one.over_tasks, two.over_tasks), (one.over_seeds, two.over_seeds), (one.over_both, two.over_both)):
        assert a.value == pytest.approx(-(b.value or 0))
        if a.low is not None and a.high is not None:
            assert (b.high, b.low) == pytest.approx((-a.low, -a.high))


@light
@given(grids, st.randoms())
def test_the_order_of_seeds_and_of_tasks_does_not_matter(pair: tuple[Grid, Grid], chance: random.Random) -> None:
    seeds = chance.sample(range(len(pair[0])), len(pair[0]))
    tasks = chance.sample(range(len(pair[0][0])), len(pair[0][0]))
    a, b = ([[grid[s][t] for t in tasks] for s in seeds] for grid in pair)
    assert pooled(counts(a), counts(b)) == pooled(counts(pair[0]), counts(pair[1]))


@light
@given(grids)
def test_an_interval_holds_its_mean_and_both_is_the_widest(pair: tuple[Grid, Grid]) -> None:
    found = pooled(counts(pair[0]), counts(pair[1]))
    both = found.over_both
    for m in (found.over_tasks, found.over_seeds, both):
        assert m.value is not None
        if m.low is None or m.high is None:
            continue
        assert -1.0 <= m.low <= m.value <= m.high <= 1.0
        if both.low is not None and both.high is not None:
            assert both.low <= m.low + 1e-9
            assert m.high <= both.high + 1e-9


@light
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=20), st.integers(2, 5))
def test_seeds_that_only_repeat_each_other_narrow_nothing(verdicts: list[tuple[int, int]], times: int) -> None:
    a, b = [x for x, _ in verdicts], [y for _, y in verdicts]
    once, often = pooled(counts([a]), counts([b])), pooled(counts([a] * times), counts([b] * times))
    assert often.over_tasks == once.over_tasks
    assert (often.over_seeds.low, often.over_seeds.high) == (None, None), (
        "no spread was seen, so nothing is known of it"
    )


def test_what_one_policy_was_not_scored_on_leaves_that_seed_alone() -> None:
    a = [{"x": Count(1, 1), "y": Count(1, 1)}, {"x": Count(1, 1), "y": Count(0, 0)}]
    b = [{"x": Count(0, 1), "y": Count(1, 1)}, {"x": Count(0, 1), "y": Count(0, 1)}]
    found = pooled(a, b)
    assert (found.over_tasks.value, found.over_seeds.value) == (0.5, 0.75)
    assert pooled([{}], [{}]).over_both.value is None


def test_both_ways_covers_the_truth_where_the_tasks_alone_do_not() -> None:
    """Every training shifts all tasks, every task answers in its own way; the truth is +20 points. 300 made-up experiments of 5 seeds × 24 tasks."""
    chance = random.Random(1)
    hits = {"both": 0, "tasks": 0}
    for _ in range(300):
        level = [chance.uniform(-0.15, 0.15) for _ in range(24)]
        effect = [0.2 + chance.uniform(-0.1, 0.1) for _ in range(24)]
        a: Grid = []
        b: Grid = []
        for _ in range(5):
            shift = chance.uniform(-0.2, 0.2)
            a.append([int(chance.random() < 0.4 + u + e + shift) for u, e in zip(level, effect, strict=True)])
            b.append([int(chance.random() < 0.4 + u) for u in level])
        found = pooled(counts(a), counts(b))
        for name, m in (("both", found.over_both), ("tasks", found.over_tasks)):
            assert m.low is not None
            assert m.high is not None
            hits[name] += m.low <= 0.2 <= m.high
    assert hits["both"] / 300 >= 0.93
    assert hits["tasks"] / 300 < 0.9


def test_mean_and_spread_say_undefined_where_one_value_says_nothing() -> None:
    assert mean_interval([Fraction(1, 2)]).low is None
    assert (spread([0.25, 0.75]).sd, spread([0.5]).sd) == (pytest.approx(0.3535533906), None)


# --- folders and document -----------------------------------------------------------------------------------------------------------

GOOD = {"base": "0000", "sft": "1100", "grpo": "1110"}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """One finished seed's folder: a stored profile, results with their manifest, and a recorded start. `verdicts` are over the tasks a, b, c, d."""

    def made(
        seed: int, policies: dict[str, str] = GOOD, *, digest: str = "v1", name: str = "smoke", **flags: object
    ) -> Path:
        folder = tmp_path / "seeds" / f"seed-{seed}"
        profile = seeded(seed, folder, name, **flags)
        (folder / "a-run").mkdir(parents=True)
        (folder / "a-run" / "profile.yaml").write_text(dump_profile(profile))
        out = Layout(profile).evaluate / "v0-20260101-000000"
        rows = [
            row(p, t, mark, digest) for p, marks in policies.items() for t, mark in zip("abcd", marks, strict=False)
        ]

        def write() -> tuple[Path, dict[str, Path], dict[str, object]]:
            write_results(out / "results.parquet", rows)
            return out, {"results": out / "results.parquet"}, {}

        run_step("evaluate", version=1, inputs={}, candidates=list, make=write, versions={"torch": "9.9"})
        start = {"minutes": 21.5, "peak_gib": 8.25, "hardware": "2 cores, Abacus, 24 GiB", "commit": "abc1234"}
        (folder / STARTS).write_text(json.dumps([start]))
        return folder

    return made


def seeded(seed: int, folder: Path, name: str = "smoke", **flags: object) -> Profile:
    return load_profile(
        name, flags={"seed": seed, "paths.output": str(folder), "evaluate.attempts": 1, **flags}, environ={}
    )


def row(policy: str, task: str, mark: str, digest: str) -> Row:
    verdict = {"1": "passed", "0": "failed", "-": "not_scored"}[mark]
    family = "edit" if task in "ab" else "script"
    return Row(policy, task, digest, family, 0, verdict, "", "finished", 1.0, 1, 1, 1, 1, 1, *[0.0] * 6)


def collect(tmp_path: Path, seeds: Sequence[int], profile: str = "smoke") -> tuple[int, Path]:
    document = tmp_path / "results.md"
    where = ["--output-dir", str(tmp_path / "seeds"), "--document", str(document)]
    return main(["--collect-only", "--profile", profile, "--seeds", *map(str, seeds), *where]), document


def cells(text: str, title: str) -> list[list[str]]:
    """The rows below the header of the table under a heading."""
    lines = [
        line for line in text.partition(f"#### {title}")[2].partition("####")[0].splitlines() if line.startswith("|")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_document_says_what_the_result_files_say(make: Make, tmp_path: Path) -> None:
    make(1)
    make(2, {"base": "0000", "sft": "1110", "grpo": "1010"})
    make(3, {"base": "0001", "sft": "1-00", "grpo": "1111"})
    code, document = collect(tmp_path, [1, 2, 3])
    text = document.read_text()
    assert code == 0
    each = cells(text, "Each seed")
    assert each[0][2].startswith("2/4 (50.0%; ")
    assert [line[4] for line in each] == ["+25.0", "-25.0", "+66.7"], (
        "seed 3 is compared on the three tasks both were scored on"
    )
    assert [line[8] for line in each] == ["0", "0", "1"]
    assert [line[:3] for line in cells(text, "Over seeds")] == [
        ["base", "3", "8.3%"],
        ["SFT", "3", "52.8%"],
        ["GRPO", "3", "75.0%"],
    ]
    assert "GRPO beat SFT in 2 of 3 seeds, tied in 0 and lost in 1" in text
    assert "the least that 3 seeds can give is 0.25" in text
    by_family = {line[0]: line[1:5] for line in cells(text, "By family")}
    assert by_family["script"][2].startswith("1/6 ")
    assert by_family["script"][3].startswith("4/6 ")
    assert "Declared and absent: 4, 5." in text
    assert "one episode for each held-out task, greedy" in text
    assert cells(text, "What it took")[0][-2:] == ["21.5", "8.2"]
    for known in ("2 cores, Abacus, 24 GiB", "torch 9.9", "abc1234"):
        assert known in text


def test_the_json_beside_it_gives_the_same_document_and_names_no_place(make: Make, tmp_path: Path) -> None:
    make(1)
    make(2)
    _, document = collect(tmp_path, [1, 2])
    stored = document.with_suffix(".json").read_text()
    assert filled(TEMPLATE.read_text(), json.loads(stored)) == document.read_text()
    assert str(tmp_path) not in stored + document.read_text()
    assert str(ROOT) not in stored + document.read_text()


def test_prose_stays_and_so_do_other_profiles_results(make: Make, tmp_path: Path) -> None:
    make(1)
    _, document = collect(tmp_path, [1])
    document.write_text("By hand.\n" + document.read_text() + "Also by hand.\n")
    make(7, name="laptop")
    assert collect(tmp_path, [7], "laptop")[0] == 0
    text = document.read_text()
    assert text.startswith("By hand.\n")
    assert text.endswith("Also by hand.\n")
    assert re.findall(r"^### `(.*)`$", text, re.MULTILINE) == ["laptop", "smoke"]
    assert "Not declared: 7." in text
    collect(tmp_path, [7], "laptop")
    assert document.read_text() == text


def test_seeds_of_another_day_stay_in_the_document_and_those_of_another_recipe_do_not(
    make: Make, tmp_path: Path
) -> None:
    make(1)
    make(2)
    make(3)
    _, together = collect(tmp_path, [1, 2, 3])
    whole = together.read_text()
    together.unlink()
    together.with_suffix(".json").unlink()
    for seeds in ([3], [1, 2]):
        _, document = collect(tmp_path, seeds)
    assert document.read_text() == whole
    shutil.rmtree(tmp_path / "seeds" / "seed-1")
    make(1, **{"grpo.learning_rate": 0.5})
    collect(tmp_path, [1])
    assert [line[0] for line in cells(document.read_text(), "Each seed")] == ["1"]


@pytest.mark.parametrize("text", ["no markers", END + BEGIN, BEGIN + END + BEGIN + END])
def test_a_document_without_one_pair_of_markers_is_left_alone(make: Make, tmp_path: Path, text: str) -> None:
    make(1)
    document = tmp_path / "results.md"
    document.write_text(text)
    assert collect(tmp_path, [1])[0] == 2
    assert document.read_text() == text
    assert not document.with_suffix(".json").exists()


def test_an_unfinished_seed_is_named_and_the_others_are_shown(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(1)
    damaged = make(2)
    next(damaged.rglob("results.parquet")).write_bytes(b"")
    make(4, {"base": "0000", "sft": "1100"})
    code, document = collect(tmp_path, [1, 2, 3, 4])
    assert code == 1
    text, said = document.read_text(), capsys.readouterr().err
    for seed in (2, 3, 4):
        assert f"- Seed {seed} is not here: it is not finished." in text
        assert f"seed {seed} is left out" in said
    assert [line[0] for line in cells(text, "Each seed")] == ["1"]


def test_nothing_finished_writes_nothing(tmp_path: Path) -> None:
    code, document = collect(tmp_path, [1, 2])
    assert code == 1
    assert not document.exists()


def test_seeds_of_different_recipes_or_tasks_are_not_pooled(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(1)
    make(2, **{"grpo.learning_rate": 0.5})
    assert collect(tmp_path, [1, 2])[0] == 2
    assert "seed 1 and seed 2 have different profiles" in capsys.readouterr().err
    make(3, digest="v2")
    assert collect(tmp_path, [1, 3])[0] == 2
    assert "different held-out tasks" in capsys.readouterr().err


def test_a_folder_of_another_recipe_is_not_run_over(make: Make) -> None:
    folder = make(1)
    with pytest.raises(UserError, match="another profile"):
        run_seed(load_profile("laptop", environ={}), 1, folder)
    assert not (folder / "profile.yaml").exists()


def test_a_run_that_fails_is_named_and_the_next_seed_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real command, refused before it starts anything: the profile names a task file that is not there."""
    profile = tmp_path / "mine.yaml"
    profile.write_text(dump_profile(seeded(0, tmp_path, **{"collect.tasks": str(tmp_path / "no.jsonl")})))
    where = ["--output-dir", str(tmp_path / "seeds"), "--document", str(tmp_path / "results.md")]
    assert main(["--profile", str(profile), "--seeds", "3", "5", *where]) == 1
    said = capsys.readouterr().err
    for seed in (3, 5):
        assert f"seed {seed} failed, the others go on: seed {seed} failed with exit code 2" in said
        folder = tmp_path / "seeds" / f"seed-{seed}"
        started = load_profile(folder / "profile.yaml", environ={})
        assert (started.seed, started.paths.data, started.paths.demo) == (seed, folder / "data", folder / "demo")
        assert len(read_starts(folder)) == 1
    assert not (tmp_path / "results.md").exists()


CHILD = """
import sys, pathlib
from configs.manifest import run_step
folder = pathlib.Path(sys.argv[1])
def make():
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x").write_text("x")
    return folder, {"x": folder / "x"}, {}
run_step("infer", version=1, inputs={}, candidates=lambda: [folder], make=make)
raise SystemExit(int(sys.argv[2]))
"""


def test_a_start_is_recorded_with_time_and_memory_unless_it_made_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "seed-1"
    folder.mkdir()
    supervised(Command([sys.executable, "-c", CHILD, str(folder / "infer"), "0"]), 1, folder)
    first = read_starts(folder)
    assert len(first) == 1
    assert first[0]["peak_gib"] is not None
    assert first[0]["minutes"] > 0
    assert re.match(r"\d+ cores, .+, \d+ GiB", first[0]["hardware"])
    supervised(Command([sys.executable, "-c", CHILD, str(folder / "infer"), "0"]), 1, folder)
    assert read_starts(folder) == first, "everything was reused, which is no part of what the seed took"
    with pytest.raises(WorkFailed, match="seed 1 failed with exit code 3"):
        supervised(Command([sys.executable, "-c", CHILD, str(folder / "infer"), "3"]), 1, folder)
    assert len(read_starts(folder)) == 2


def test_the_results_document_of_this_repository_is_what_its_data_say() -> None:
    document, stored = ROOT / "docs" / "results.md", ROOT / "docs" / "results.json"
    assert document.is_file() == stored.is_file(), "they are written together, by benchmarks.seeds"
    every = json.loads(stored.read_text()) if stored.is_file() else {}
    text = document.read_text() if document.is_file() else TEMPLATE.read_text()
    assert not every or filled(text, every) == text
    assert every or filled(TEMPLATE.read_text(), {}).replace("\n", "") == TEMPLATE.read_text().replace("\n", "")
