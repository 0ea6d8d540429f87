"""Validation in GRPO: probes, the choice of a checkpoint and the collapse alarm; pure parts, no train environment."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.task import Task, Verifier
from agents.trajectory import Outcome, StopReason, Trajectory, Verdict
from configs.errors import UserError
from configs.files import append_lines, read_jsonl, write_jsonl
from configs.load import load_profile
from tasks_lib.parameters import check_splits
from training import grpo, guard, probe, validation
from training.checkpoints import CONFIG, WEIGHTS, last_whole
from training.collapse import collapsed, entropy_gone, fall, falling, worse
from training.evaluate import _metrics
from training.metrics import Logged
from training.page import html
from training.report import build
from training.trainer import METRICS

Passed = list[bool | None]


def made(step: int, passed: Passed) -> dict[str, Any]:
    """A probe of tasks of two families in turn."""
    trajectories = [
        Trajectory(
            task_id=f"t{place}",
            task_digest="d",
            family=("edit", "script")[place % 2],
            agent="builtin",
            model="m",
            attempt=0,
            messages=[],
            stop_reason=StopReason.FINISHED if one is not None else StopReason.INFRA_ERROR,
            outcome=Outcome(
                verdict={True: Verdict.PASSED, False: Verdict.FAILED, None: Verdict.NOT_SCORED}[one], reason="r"
            ),
        )
        for place, one in enumerate(passed)
    ]
    return probe.record(step, trajectories, 1.0, 0.0)


def curve(*passes: int, tasks: int = 48) -> list[dict[str, Any]]:
    """Probes every second step that pass the first `n` tasks: what was lost was lost for good."""
    return [made(2 * place, [task < n for task in range(tasks)]) for place, n in enumerate(passes)]


def test_a_probe_counts_by_family_and_leaves_what_was_not_scored_out_of_the_rate() -> None:
    found = made(4, [True, False, None, True])
    assert (found["step"], found["tasks"], found["scored"], found["passes"], found["not_scored"]) == (4, 4, 3, 2, 1)
    assert found["families"] == {"edit": [1, 1], "script": [1, 2]}
    assert found["stop_reasons"] == {"finished": 3, "infra_error": 1}
    assert found["results"] == {"t0": True, "t1": False, "t2": None, "t3": True}
    assert found["pass_rate"] == pytest.approx(2 / 3, abs=1e-6)
    assert "pass_rate" not in made(0, [None, None]), "no number instead of a zero"


@given(tasks=st.integers(1, 60), ranks=st.integers(1, 8))
def test_ranks_share_every_task_once_and_call_the_engine_equally_often(tasks: int, ranks: int) -> None:
    shares = [probe.share(tasks, rank, ranks) for rank in range(ranks)]
    assert len({len(mine) for mine in shares}) == 1
    places = list(itertools.chain.from_iterable(shares))
    assert sorted(place for place in places if place < tasks) == list(range(tasks))
    assert len(places) - tasks < ranks


def test_the_best_probe_is_kept_and_of_equal_ones_the_later_but_the_start_keeps_a_tie() -> None:
    assert (probe.best(curve(20, 23, 22)) or {})["step"] == 2
    assert (probe.best(curve(20, 23, 22, 23)) or {})["step"] == 6
    assert (probe.best(curve(23, 20, 23)) or {})["step"] == 0
    assert probe.best([]) is None


def test_a_probe_that_scored_too_little_is_not_the_best_however_lucky() -> None:
    lucky = made(4, [True] * 8 + [None] * 2)
    assert (probe.best([*curve(6, 7, tasks=10), lucky]) or {})["step"] == 2
    assert probe.best([lucky]) is None


def test_the_collapse_of_the_second_trial_recipe_is_seen_at_once() -> None:
    # FACTS: 26 of 48 after SFT, 12 after ten steps with 2 prompts × 8, 3e-4 and no KL, all of one family.
    assert "from 26 of 48 after step 0 to 12 of 48 after step 2" in collapsed(curve(26, 12))
    assert collapsed(curve(26, 27, 25, 26, 12)), "and after four quiet probes as well"
    before = [True] * 26 + [False] * 22
    now = [False] * 20 + [True] * 6 + [True] * 6 + [False] * 16  # 20 lost and 6 won
    assert collapsed([made(0, before), made(2, now)])


def test_the_curves_of_the_good_recipe_and_of_a_bad_day_are_no_collapse() -> None:
    assert not collapsed(curve(26, 34, 37, 38))
    assert not collapsed(curve(26, 34, 31))
    assert not collapsed(curve(26))
    assert not collapsed([])


def test_a_probe_that_scored_too_little_does_not_hide_a_collapse() -> None:
    before, lucky, now = made(0, [True] * 26 + [False] * 22), made(5, [True] * 3 + [None] * 45), made(10, [False] * 48)
    assert collapsed([before, lucky, now])
    assert not collapsed([lucky, now]), "with nothing to compare with, nothing is said"


def test_not_scored_tasks_are_neither_won_nor_lost() -> None:
    before, now = made(0, [True] * 48), made(2, [None] * 48)
    assert worse(before["results"], now["results"]) == 1.0
    assert not collapsed([before, now])


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_worse_is_an_exact_one_sided_p_value(pairs: list[tuple[bool, bool]]) -> None:
    before, now = ({str(place): pair[side] for place, pair in enumerate(pairs)} for side in (0, 1))
    down, up = worse(before, now), worse(now, before)
    assert 0 < down <= 1
    assert max(down, up) == 1.0, "not worse both ways"
    lost, won = (sum(pair == (side, not side) for pair in pairs) for side in (True, False))
    if lost > won == 0:
        assert down == pytest.approx(0.5**lost)


def test_a_policy_that_stays_as_it_is_seldom_raises_the_alarm() -> None:
    """The hardest case: every task is a coin, and each probe is compared with the luckiest of those before it."""
    rng = random.Random(7)
    alarms = 0
    for _ in range(200):
        probes = [made(step, [rng.random() < 0.5 for _ in range(48)]) for step in range(6)]
        alarms += any(collapsed(probes[:end]) for end in range(2, 7))
    assert alarms / 200 < 0.15  # five comparisons of at most 5% each


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_fall_is_the_share_of_all_ways_to_deal_the_groups_that_look_as_bad(start: list[int], end: list[int]) -> None:
    rates = [[value / 4 for value in values] for values in (start, end)]
    both = [*start, *end]
    ways = list(itertools.combinations(range(len(both)), len(end)))
    as_bad = sum(sum(both[place] for place in way) <= sum(end) for way in ways)
    assert fall(*rates) == pytest.approx(as_bad / len(ways))


def test_a_falling_pass_rate_is_seen_and_a_swinging_task_mix_is_not() -> None:
    good, bad = [1.0, 0.75, 0.5, 1.0], [0.0, 0.25, 0.0, 0.0]
    assert "fell from 81% in the first 2 steps to 6% in the last 2" in falling([good, good, bad, bad])
    assert not falling([good, bad, bad]), "the windows would overlap"
    assert not falling([good, [0.25, 0.5, 0.75, 1.0], [0.5, 0.5, 0.25, 1.0], good])
    assert not falling([[1.0, 0.0, 1.0, 0.0]] * 6)
    assert not falling([])


def test_entropy_that_is_nearly_gone_is_told_once(tmp_path: Path) -> None:
    assert not entropy_gone(0.5, 0.02)
    assert "from 0.5 to 0.0049" in entropy_gone(0.5, 0.0049)
    assert not entropy_gone(0.0, 0.0)
    from tests.test_grpo_prepare import run

    this = run(tmp_path)
    watch = grpo._watch_entropy(this, tmp_path)
    for step, value in enumerate((0.5, 0.4, 0.001, 0.0005), start=1):
        watch(Logged(step, 9, None, {"entropy/mean": value}))
    events = [json.loads(line) for line in (this.folder / "events.jsonl").read_text().splitlines()]
    assert [event["note"][:6] for event in events if event["kind"] == "warning"] == ["step 3"]


def test_a_notice_is_heard_also_behind_a_progress_bar_and_nothing_else_is() -> None:
    line = probe.notice("probe", "probe after step 4: 23 of 48", at=4, pass_rate=0.5)
    said = {"kind": "probe", "note": "probe after step 4: 23 of 48", "at": 4, "pass_rate": 0.5}
    assert probe.heard(line) == probe.heard(f"Train:  50%|███ | 2/4 [00:10<00:10]{line}Train: 75%") == said
    assert probe.heard("agentexecutor patch no dropout: applied") is None
    assert probe.heard(line[:-9]) is None


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (WEIGHTS, CONFIG, "optimizer.pt", "trainer_state.json", "args.json"):
        (folder / name).write_text(folder.name + name)
    return folder


def test_the_result_is_the_best_checkpoint(tmp_path: Path) -> None:
    last, start = tmp_path / "checkpoint-4", adapter(tmp_path / "sft")
    append_lines(tmp_path / probe.PROBES, curve(20, 25, 21))
    assert validation.chosen(tmp_path, start, last) == tmp_path / "checkpoint-2"


def test_without_probes_the_result_is_the_last_checkpoint(tmp_path: Path) -> None:
    assert validation.chosen(tmp_path, None, tmp_path / "checkpoint-4") == tmp_path / "checkpoint-4"


def test_where_nothing_beats_the_start_its_adapter_is_the_result_as_a_copy_that_nobody_resumes(tmp_path: Path) -> None:
    start = adapter(tmp_path / "sft" / "checkpoint-12")
    folder = tmp_path / "v0-20260101-000000"
    append_lines(folder / probe.PROBES, curve(25, 20, 25))
    for _ in range(2):  # and again after a crash
        found = validation.chosen(folder, start, folder / "checkpoint-4")
        assert sorted(path.name for path in found.iterdir()) == sorted([WEIGHTS, CONFIG, "args.json"])
    assert found.parent == folder
    assert (found / WEIGHTS).read_bytes() == (start / WEIGHTS).read_bytes()
    assert last_whole(folder) is None
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["start"]


def test_the_base_is_no_adapter_so_the_best_checkpoint_is_taken_all_the_same(tmp_path: Path) -> None:
    append_lines(tmp_path / probe.PROBES, curve(25, 20, 21))
    assert validation.chosen(tmp_path, None, tmp_path / "checkpoint-4") == tmp_path / "checkpoint-4"
    append_lines(tmp_path / probe.PROBES, [made(6, [False] * 48)])
    assert validation.chosen(tmp_path, None, tmp_path / "checkpoint-6") == tmp_path / "checkpoint-4"


def test_the_summary_says_probes_best_step_families_and_the_collapse() -> None:
    found = validation.summary(curve(26, 30, 12))
    assert found["probes"] == {"step 0": "26 of 48", "step 2": "30 of 48", "step 4": "12 of 48"}
    assert found["best_step"] == 2
    assert found["validation_by_family"] == {"edit": "13 of 24 → 15 of 24", "script": "13 of 24 → 15 of 24"}
    assert "from 30 of 48 after step 2 to 12 of 48 after step 4" in found["collapsed"]
    assert "collapsed" not in validation.summary(curve(26, 30))
    assert validation.summary([]) == {}


def test_probes_after_the_checkpoint_are_forgotten_and_so_are_rollouts_of_a_probe_that_was_not_counted(
    tmp_path: Path,
) -> None:
    append_lines(tmp_path / probe.PROBES, curve(20, 21, 22))
    rollouts = tmp_path / "rollouts" / probe.PROBES
    write_jsonl(rollouts, [{"extra": {"step": step}} for step in (0, 2, 3, 4)])
    rollouts.write_text(rollouts.read_text() + '{"extra": {"st')
    validation.forget_after(tmp_path, 3)
    assert [row["step"] for row in validation.probes(tmp_path)] == [0, 2]
    assert [row["extra"]["step"] for row in read_jsonl(rollouts)] == [0, 2], "step 3 has no probe: it was cut"


def task(name: str) -> Task:
    return Task(id=name, prompt=f"Do {name}.", verifier=Verifier(command="true"))


def test_validation_tasks_that_are_trained_on_or_held_out_are_refused_by_name(tmp_path: Path) -> None:
    for split in ("train", "rl", "held"):
        write_jsonl(tmp_path / f"{split}.jsonl", [task(split).model_dump(mode="json")])
    profile = load_profile("smoke", flags=_paths(tmp_path), environ={})
    rows = tmp_path / "rows.jsonl"
    write_jsonl(rows, grpo.prompt_rows(profile, [task("other")]))
    for name, split in {"other": "training", "train": "training", "rl": "training", "held": "held-out"}.items():
        with pytest.raises(UserError, match=f"validation task '{name}' is also in the {split} split"):
            validation.inputs(profile, [task(name)], rows)
    assert set(validation.inputs(profile, [task("new")], rows)) == {"validation"}
    write_jsonl(tmp_path / "validation.jsonl", [task("held").model_dump(mode="json")])
    with pytest.raises(UserError, match="validation task 'held' is also in the held-out split"):
        check_splits(load_profile("smoke", flags=_paths(tmp_path), environ={}))  # before anything is paid for
    assert validation.inputs(profile, [], rows) == {}


def _paths(folder: Path) -> dict[str, str]:
    names = {"collect.tasks": "train", "grpo.tasks": "rl", "evaluate.tasks": "held", "grpo.validation": "validation"}
    return {key: str(folder / f"{name}.jsonl") for key, name in names.items()}


def test_what_a_choice_depends_on_is_tasks_and_how_and_when_they_are_played_and_no_path(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")

    def digest(some: list[Task], **flags: Any) -> dict[str, str]:
        return validation.inputs(load_profile("smoke", flags=flags, environ={}), some, rows)

    some = [task("new")]
    assert digest(some) == digest(some, **{"grpo.validation": "elsewhere.jsonl"})
    for flags in ({"evaluate.temperature": 0.5}, {"grpo.save_steps": 2}, {"collect.max_turns": 9}):
        assert digest(some) != digest(some, **flags)
    assert digest(some) != digest([*some, task("more")])


def test_a_profile_plays_only_the_first_tasks_it_asks_for() -> None:
    for name in ("laptop", "smoke"):
        profile = load_profile(name, flags={"grpo.probe_tasks": 1}, environ={})
        assert [t.family for t in validation.validation_tasks(profile)] == ["script"]
    assert validation.validation_tasks(load_profile("one-gpu", environ={})) == []


def test_local_sandboxes_let_a_probe_play_many_tasks_together_and_others_what_a_step_holds() -> None:
    laptop = load_profile("laptop", environ={})
    assert guard.at_once(laptop, queued=True) == guard.LOCAL
    assert guard.at_once(laptop, queued=False) == 32, "by transformers it is one batch"
    assert guard.at_once(load_profile("laptop", flags={"sandboxes.backend": "e2b"}, environ={}), queued=True) == 32


def test_the_page_draws_probes_entropy_and_pass_rate_by_step(tmp_path: Path) -> None:
    row = {"step": 2.0, "reward": 0.5, "entropy/mean": 0.3, "agent/pass_rate": 0.4}
    append_lines(tmp_path / METRICS, [row])
    append_lines(tmp_path / probe.PROBES, [*curve(20, 30), made(4, [None] * 4)])
    report = build([], ["grpo"], 1, {"model": "m", "headline": "h"})
    page = html(report, {"grpo": _metrics(tmp_path / "checkpoint-2")})
    for title in ("pass rate on validation tasks", "entropy of the sampled tokens", "pass rate of the rollouts"):
        assert f"grpo: {title}" in page
    assert "nan" not in page.lower()
