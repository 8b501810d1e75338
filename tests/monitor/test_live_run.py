"""The newest steps of a run as analysis sees a run: the same figures, and bounded."""

from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.errors import NotARunError
from dtprof.monitor import live_run
from dtprof.monitor.live_run import LiveWindow
from dtprof.records.reader import open_run
from tests import builders
from tests.builders import RankBuilder

MS = 1_000_000
STEP = 100 * MS


def two_ranks(num_steps: int, late_ms: int = 20) -> list[RankBuilder]:
    """Return ranks of which the second waits so long a step for the first."""
    ranks = [RankBuilder(number, 2) for number in range(2)]
    for step in range(num_steps):
        t = step * STEP
        for rank in ranks:
            late = late_ms * MS * (rank.rank == 0)
            rank.span("forward", t, t + 20 * MS)
            rank.span("backward", t + 20 * MS, t + 60 * MS + late)
            rank.op("all_reduce", t + 60 * MS + late, t + 85 * MS, nbytes=1 << 20)
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
            rank.sample("rss_bytes", t + 96 * MS, 1 << 30)
    return ranks


def test_window_that_holds_all_of_a_run_gives_its_summary(tmp_path: Path) -> None:
    run = builders.write_run(tmp_path / "run", two_ranks(12))
    live = LiveWindow(run)
    live.poll()
    live.poll()
    whole, seen = summarise(open_run(run)), summarise(live)
    assert seen.steps == whole.steps
    assert [rank.partition_ns for rank in seen.ranks] == [rank.partition_ns for rank in whole.ranks]
    assert seen.collectives == whole.collectives
    assert seen.stragglers == whole.stragglers


def test_window_of_few_steps_numbers_them_as_the_run_does(tmp_path: Path) -> None:
    live = LiveWindow(builders.write_run(tmp_path / "run", two_ranks(60)), max_steps=8)
    live.poll()
    assert live.first_step == 52
    seen = summarise(live)
    assert seen.steps.count == 60
    assert seen.steps.used is not None
    assert seen.steps.used[0] >= 52
    assert seen.ranks[1].partition_ns is not None
    assert seen.ranks[1].partition_ns["exposed_wait"] == 20 * MS


def test_records_are_bounded_even_within_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "MIN_ROWS", 50)
    rank = RankBuilder(0, 1)
    for i in range(400):
        rank.op("barrier", i * 1000, i * 1000 + 1)
    live = LiveWindow(builders.write_run(tmp_path / "run", [rank]), max_rows=100)
    live.poll()
    kept = live.load(0).operations
    assert 0 < len(kept) <= 100
    assert kept["seq"][-1] == 399


def test_run_that_is_deleted_is_reported(tmp_path: Path) -> None:
    run = builders.write_run(tmp_path / "run", two_ranks(3))
    live = LiveWindow(run)
    live.poll()
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(NotARunError, match="does not exist"):
        live.poll()
    with pytest.raises(NotARunError, match="does not exist"):
        LiveWindow(run)


def test_newest_steps_hold_what_settled_late_and_what_came_before_it(tmp_path: Path) -> None:
    live = LiveWindow(builders.write_run(tmp_path / "run", two_ranks(12)))
    live.poll()
    operations = live._recent[0].tables[0]
    rows = operations.parts[0]
    operations.replace(rows[:0])
    for first, last in ((0, 3), (4, 11), (11, 12), (3, 4)):  # an operation of step 3 settled last, alone
        operations.take(rows[first:last])
    newest = live.frozen(first=10)
    assert newest.load(0).operations["step"].tolist() == [10, 11]  # counted from 0
    assert len(newest.load(0).samples) < 4
    assert live.frozen().load(0).operations["step"].tolist() == list(range(12))
    assert len(live.frozen().load(0).samples) == 12


def test_what_is_frozen_stays_as_it_is(tmp_path: Path) -> None:
    live = LiveWindow(builders.write_run(tmp_path / "run", two_ranks(12)))
    live.poll()
    all_of_it, newest = live.frozen(), live.frozen(first=10)
    live._recent[0].keep_from(11)
    assert set(all_of_it.load(0).operations["step"].tolist()) == set(range(12))
    assert set(newest.load(0).operations["step"].tolist()) == {10, 11}
