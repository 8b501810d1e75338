"""Of a long log only the newest segments are read whole: what the rules look at is the same as if all were."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtprof.diagnosis.job_state import RankState
from dtprof.diagnosis.sources import recorded_ranks
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records import events, paths, schema
from dtprof.records.rank_log import counted_segments
from dtprof.records.rank_log.archive import archive_segment
from dtprof.records.reader import Run, open_run
from dtprof.records.tables import RankTables
from tests.builders import FLAG, RankBuilder, write_run

RECORDS = 16
"""A segment has room for."""
NEWEST = 40
"""Operations that are looked at; the times of the newest ones begin after them."""
STEPS = 60
MS = 1_000_000
S = 1_000_000_000


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let logs of some hundred events be long."""
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", RECORDS)
    monkeypatch.setattr(schema, "SEGMENT_SIZE", schema.HEADER_SIZE + RECORDS * schema.RECORD_SIZE)
    for name in ("MAX_COLLECTIVES", "MIN_COLLECTIVES", "MAX_TAIL", "MIN_TAIL"):
        monkeypatch.setattr(recorded_ranks, name, NEWEST)
    monkeypatch.setattr(recorded_ranks, "MAX_PAUSES", 0)


def busy_rank() -> RankBuilder:
    """Return a rank that did something of every kind long ago, and not again."""
    own = RankBuilder(0, world_size=4, closed=False)
    own.span(events.NEW_GROUP, 0, 1, site=own.site("new_group", line=3))
    pairs = own.group("1", (0, 2), "pairs")
    own.span("phase training", 1)
    own.op("all_gather", 2, 3, group=pairs, nbytes=8)
    own.op("all_gather", 3, 4, group=pairs, nbytes=8)
    own.span(events.CHECKPOINT, 10 * MS, 10 * MS + 6 * S, site=own.site("save", line=9))
    t = 8 * S
    for step in range(STEPS):
        t += S if step == 20 else 10 * MS
        own.span(events.DATA, t, t + MS, step=step, flags=FLAG["skipped"] if step % 30 == 29 else 0)
        own.span(events.FORWARD, t + MS, t + 2 * MS, step=step)
        own.op("send", t + 2 * MS, t + 3 * MS, step=step, peer=1, tag=step % 2, nbytes=4)
        if step < 5:
            own.op("recv", t + 3 * MS, t + 4 * MS, step=step, peer=3, tag=7, nbytes=4)
        own.op("all_reduce", t + 4 * MS, t + 5 * MS, step=step, nbytes=8, site=own.site("all_reduce", line=20))
    own.op("all_reduce", t + 6 * MS, step=STEPS, nbytes=8, site=own.site("all_reduce", line=20))
    return own


def read(run: Run) -> RankState:
    """Return what the rules look at."""
    (found,) = recorded_ranks.read_ranks(run, [0], THIS_PROCESS)
    return found.evidence


def load_newest(run: Run) -> RankTables:
    """Return the rank as the diagnosis reads it."""
    return run.load_newest(0, of_all=NEWEST, of_each=NEWEST)


def archive_all_but_the_newest(run: Path) -> None:
    """Do what the launcher does while the job runs."""
    for segment in paths.segment_files(run / paths.rank_folder_name(0, 0))[:-1]:
        if not paths.is_archive(segment):
            archive_segment(segment)


@pytest.mark.parametrize("archived", [False, True])
def test_the_rules_see_the_same_of_a_long_log_whether_it_is_read_whole_or_not(
    tmp_path: Path, archived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", [busy_rank()], exit_status=1)
    if archived:
        archive_all_but_the_newest(path)
    run = open_run(path)
    newest, whole = load_newest(run), run.load(0)
    assert newest.past is not None
    assert len(newest.operations) == NEWEST, "the rest is counted, that of their segment too"
    assert len(newest.spans) < 45 < len(whole.spans)
    seen = read(run)
    monkeypatch.setattr(Run, "load_newest", lambda self, rank, attempt=None, **_: self.load(rank, attempt))
    expected = read(run)
    assert list(seen.operations) == list(expected.operations)
    assert seen.open_operations == expected.open_operations != ()
    assert {name: table.tolist() for name, table in seen.messages.items()} == {
        name: table.tolist() for name, table in expected.messages.items()
    }
    for group, table in expected.collectives.groups.items():
        for column in ("seq", "forwards", "issued_ns", "line"):
            np.testing.assert_array_equal(seen.collectives.groups[group][column], table[column])
    other = {"operations": (), "first_row": 0, "messages": {}, "collectives": None, "blocked_share": 0.0}
    other["exhaustions"] = ()  # the newest
    assert replace(seen, **other) == replace(expected, **other)


def test_what_was_long_ago_is_counted(tmp_path: Path) -> None:
    own = read(open_run(write_run(tmp_path / "run", [busy_rank()], exit_status=1)))
    assert {(key.name, p2p): count for (key, p2p), count in own.counts.items()} == {
        ("1", False): 2,
        ("0", False): STEPS + 1,
        ("0", True): STEPS + 5,
    }
    assert {(c.peer, c.tag, c.sends): count for c, count in own.channels.items()} == {
        (1, 0, True): 30,
        (1, 1, True): 30,
        (3, 7, False): 5,
    }
    assert (own.batches, own.exhausted, own.newest_is_exhaustion) == (58, 2, True)
    assert [site.line for site in own.group_sites if site is not None] == [3]
    assert [(phase.phase, phase.end_ns - phase.begin_ns) for phase in own.long_phases] == [(events.CHECKPOINT, 6 * S)]
    assert own.longest_gap_ns == 1 * S - 2 * MS, (
        "from the all_reduce of step 19, 4 ms after its begin, to the next send"
    )


def test_what_was_counted_of_a_running_job_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "whole", [busy_rank()]) / paths.rank_folder_name(0, 0)
    segments = paths.segment_files(folder)
    growing = write_run(tmp_path / "run", [busy_rank()])
    there = growing / paths.rank_folder_name(0, 0)
    for segment in paths.segment_files(there):
        segment.unlink()
    opened: list[str] = []

    def read(file: Path, columns: Sequence[str]) -> object:
        opened.append(file.name)
        return read_columns(file, columns)

    read_columns = counted_segments._read
    monkeypatch.setattr(counted_segments, "_read", read)
    known = counted_segments.KnownCounts()
    times = Counter[str]()
    for segment in segments:
        shutil.copy(segment, there)
        archive_all_but_the_newest(growing)
        run = replace(open_run(growing), counts=known)
        opened.clear()
        found = load_newest(run).past
        times.update(set(opened))
        anew = load_newest(replace(run, counts=None)).past
        if anew is None:
            assert found is None, "the log is short"
            continue
        assert found is not None
        assert found.counts.items() >= anew.counts.items(), "positions of other groups are in newer records"
        assert replace(found, counts=anew.counts) == anew
    assert set(times.values()) == {1}
    assert len(times) > len(segments) / 2


def test_a_short_log_is_read_whole_and_kept(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", [busy_rank()])).kept()
    assert run.load_newest(0, of_all=1000, of_each=NEWEST).past is None
    assert run.load(0) is run.load_newest(0, of_all=NEWEST, of_each=NEWEST)


def test_of_a_run_of_newest_operations_older_records_are_as_good_as_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(write_run(tmp_path / "run", [busy_rank()]))
    monkeypatch.setattr("dtprof.records.reader.count_past", None)  # nothing is counted
    newest = run.only_newest(NEWEST, of_each=NEWEST).load(0)
    assert newest.past is None
    assert len(newest.operations) == NEWEST < len(run.load(0).operations)
    assert newest.first_ns == run.load(0).first_ns
    assert not newest.problems


def test_a_rank_without_operations_is_read_from_its_newest_records_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_segments, "MOST_FOR_EACH", 1)
    own = RankBuilder(0, world_size=1)
    for step in range(400):
        own.span(events.FORWARD, step * MS, step * MS + 1, step=step)
    run = open_run(write_run(tmp_path / "run", [own]))
    found = load_newest(run)
    assert found.past is not None
    assert len(found.spans) == 3 * RECORDS, "segments are read until they hold 40 records"
    assert found.past.forwards == 400 - 3 * RECORDS
    newest = run.only_newest(NEWEST, of_each=NEWEST).load(0)
    assert newest.first_whole_step == int(newest.spans["step"][0]) + 1


def test_a_newest_segment_that_has_no_header_yet_changes_nothing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [busy_rank()])
    folder = path / paths.rank_folder_name(0, 0)
    number = len(paths.segment_files(folder))
    (folder / paths.segment_name(number)).write_bytes(bytes(schema.SEGMENT_SIZE))
    found = load_newest(open_run(path))
    assert found.past is not None
    assert len(found.operations) < NEWEST + RECORDS


def damage(folder: Path) -> None:
    """Write an impossible state over the second record."""
    segment = folder / paths.segment_name(0)
    data = bytearray(segment.read_bytes())
    data[schema.HEADER_SIZE + schema.RECORD_SIZE] = 99
    segment.write_bytes(data)


def cut(folder: Path) -> None:
    """Leave an archive that is cut."""
    archive_segment(folder / paths.segment_name(1))
    archive = paths.archive_of(folder / paths.segment_name(1))
    archive.write_bytes(archive.read_bytes()[:-20])


@pytest.mark.parametrize("spoil", [damage, cut])
def test_a_log_with_damage_in_its_past_is_read_whole(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = write_run(tmp_path / "run", [busy_rank()])
    spoil(path / paths.rank_folder_name(0, 0))
    found = load_newest(open_run(path))
    assert found.past is None
    assert len(found.operations) > 100
    assert found.problems


def test_a_log_with_a_refused_call_in_its_past_is_read_whole(tmp_path: Path) -> None:
    own = RankBuilder(0, world_size=2)
    for i in range(100):
        own.op("all_reduce", i * MS, i * MS + 1, state="failed" if i == 3 else None)
    found = load_newest(open_run(write_run(tmp_path / "run", [own])))
    assert found.past is None, "the call holds no position: all after it count one less"
    assert len(found.operations) == 100
