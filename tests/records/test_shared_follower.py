"""Takers of one follower get all records each, however seldom they come, and the run is read once for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprof.records import run_follower, schema
from dtprof.records.shared_follower import SharedFollower, Subscription
from tests.builders import RankBuilder, write_run
from tests.monitor.growing import grow

RANKS, EVENTS = 2, 12


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ranks = [RankBuilder(rank, RANKS) for rank in range(RANKS)]
    for rank in ranks:
        for number in range(EVENTS):
            rank.op("all_reduce", 10 * number, 10 * number + 5)
    return write_run(tmp_path / "run", ranks)


def taken(records: Subscription) -> Iterator[tuple[int, int]]:
    """Give rank and position of every operation that has settled."""
    for growths, _ in records.take():
        for rank, growth in growths.items():
            yield from ((rank, int(seq)) for seq in growth.tables.operations["seq"])


def test_each_taker_gets_every_record_once_however_often_it_comes(run: Path) -> None:
    follower = SharedFollower(run, boot_id=None)
    often, seldom = follower.subscribe(), follower.subscribe()
    first, second = [], []
    for poll, _ in enumerate(grow(run, 6)):
        first += taken(often)
        if poll == 3:
            second += taken(seldom)
    second += taken(seldom)
    everything = sorted((rank, seq) for rank in range(RANKS) for seq in range(EVENTS))
    assert sorted(first) == sorted(second) == everything


def test_records_are_read_once_for_all_takers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = run_follower.RunFollower
    monkeypatch.setattr(run_follower, "RunFollower", lambda *given, **named: made.append(1) or real(*given, **named))
    follower = SharedFollower(run, boot_id=None)
    takers = [follower.subscribe() for _ in range(3)]
    assert [len(list(taken(records))) for records in takers] == [RANKS * EVENTS] * 3
    assert made == [1]


def test_nothing_is_kept_for_a_taker_that_has_left(run: Path) -> None:
    follower = SharedFollower(run, boot_id=None)
    left, stays = follower.subscribe(), follower.subscribe()
    left.close()
    assert len(list(taken(stays))) == RANKS * EVENTS
    assert [len(waiting) for waiting in follower._waiting] == [0]
    stays.close()
    assert follower._follower is None


def test_a_log_of_several_segments_comes_in_parts_of_which_the_last_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "SEGMENT_SIZE", 1 << 14)
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", 100)
    rank = RankBuilder(0, 1)
    for number in range(250):
        rank.op("all_reduce", 10 * number, 10 * number + 5)
    records = SharedFollower(write_run(tmp_path / "run", [rank]), boot_id=None).subscribe()
    parts = [(len(growths[0].tables.operations), is_last) for growths, is_last in records.take()]
    assert sum(count for count, _ in parts) == 250
    assert [is_last for _, is_last in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1
