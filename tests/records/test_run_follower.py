"""A run that is followed while it is written gives every record once, and what is open each time."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from dtprof.records import paths, run_follower, schema, tables
from dtprof.records.rank_log import archive, short_logs
from dtprof.records.rank_log.short_logs import decode_each
from dtprof.records.reader import open_run
from dtprof.records.run_follower import Growth, LogFollower, RunFollower
from tests import builders
from tests.builders import RankBuilder

MS = 1_000_000
SMALL = 1 << 14


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let segments be small files: some tests write many."""
    monkeypatch.setattr(schema, "SEGMENT_SIZE", SMALL)


def put(run: Path, rank: RankBuilder, scratch: Path) -> Path:
    """Bring the log of a rank in a run to the state of the builder, in place as a recorder does."""
    builders.write_run(scratch, [rank])
    folder = run / paths.rank_folder_name(rank.rank, rank.attempt)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (scratch / folder.name).iterdir():
        with (folder / file.name).open("r+b" if (folder / file.name).exists() else "wb") as there:
            there.write(file.read_bytes())
    return folder


def poll(follower: LogFollower) -> Growth:
    """Return what a rank has gained since the last look."""
    return follower.grow(*decode_each(follower.read()))


def job(num_steps: int, *, last_is_open: bool = False) -> RankBuilder:
    """Return a rank after some steps: an all_reduce that is waited for later, a barrier, spans and a sample each."""
    rank = RankBuilder(0, 2, closed=False)
    for step in range(num_steps):
        t = step * 10 * MS
        is_open = last_is_open and step == num_steps - 1
        rank.span("backward", t, None if is_open else t + 4 * MS)
        waits = None if is_open else (t + 2 * MS, t + 4 * MS)
        rank.op("all_reduce", t + MS, None if is_open else t + 3 * MS, is_async=True, waits=waits, nbytes=8, api="ddp")
        if not is_open:
            rank.op("barrier", t + 5 * MS, t + 6 * MS)
            rank.span("optimizer", t + 7 * MS, t + 8 * MS)
            rank.sample("rss_bytes", t + 9 * MS, 1000 + step)
    return rank


def test_each_record_is_given_once_and_names_with_it(tmp_path: Path) -> None:
    folder = put(tmp_path / "run", job(1), tmp_path / "0")
    follower = LogFollower(folder, rank=0, attempt=0)
    given: list[tables.RankTables] = []
    for n in range(1, 6):
        put(tmp_path / "run", job(n), tmp_path / str(n))
        grown = poll(follower)
        assert [len(grown.open_operations), len(grown.open_spans)] == [0, 0]
        assert grown.newest_ns == builders.START_NS + (10 * n - 1) * MS
        given.append(grown.tables)
        assert grown.tables.ops[grown.tables.operations["op"][0]] == "all_reduce"
        assert grown.tables.groups[0].ranks == (0, 1)
        assert grown.tables.sites[int(grown.tables.operations["site"][0])].api == "ddp"
        assert grown.tables.world_size == 2
    assert len(poll(follower).tables.operations) == 0
    whole = open_run(tmp_path / "run").load(0)
    for name in ("operations", "spans", "samples"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in given]), getattr(whole, name))


def test_what_is_open_is_given_as_open_until_it_has_settled(tmp_path: Path) -> None:
    folder = put(tmp_path / "run", job(2, last_is_open=True), tmp_path / "0")
    follower = LogFollower(folder, rank=0, attempt=0)
    first = poll(follower)
    assert [len(first.tables.operations), len(first.tables.spans)] == [2, 2]
    assert first.newest_ns == builders.START_NS + 11 * MS
    for again in (first, poll(follower)):
        assert again.open_operations["step"].tolist() == [1]
        assert again.open_spans["begin_ns"].tolist() == [builders.START_NS + 10 * MS]
        assert again.open_spans["end_ns"].tolist() == [tables.UNKNOWN_NS]
    put(tmp_path / "run", job(2), tmp_path / "1")
    last = poll(follower)
    assert [len(last.tables.operations), len(last.tables.spans)] == [2, 2]
    assert last.newest_ns == builders.START_NS + 19 * MS
    assert not len(last.open_operations)
    assert not len(last.open_spans)


def test_handle_that_nobody_waits_for_settles_with_the_next_step(tmp_path: Path) -> None:
    rank = RankBuilder(0, 1, closed=False)
    rank.op("all_reduce", 0, MS, is_async=True)
    follower = LogFollower(put(tmp_path / "run", rank, tmp_path / "0"), rank=0, attempt=0)
    assert [len(poll(follower).tables.operations), len(poll(follower).open_operations)] == [0, 1]
    rank.span("backward", 2 * MS, 3 * MS)
    rank.span("optimizer", 3 * MS, 4 * MS)
    rank.op("barrier", 5 * MS, 6 * MS)
    put(tmp_path / "run", rank, tmp_path / "1")
    assert len(poll(follower).tables.operations) == 2


def test_operation_without_completion_settles_with_the_next_step(tmp_path: Path) -> None:
    rank = RankBuilder(0, 1, closed=False)
    rank.op("all_reduce", 0, returned=1000, flags=schema.FLAG["device"], step=0)
    rank.op("all_reduce", MS, returned=MS + 1000, flags=schema.FLAG["device"], step=1)
    follower = LogFollower(put(tmp_path / "run", rank, tmp_path / "0"), rank=0, attempt=0)
    grown = poll(follower)
    assert grown.tables.operations["step"].tolist() == [0]
    assert grown.open_operations["step"].tolist() == [1]


def test_segments_are_followed_one_after_the_other_archived_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", 8)
    counts = []
    folder = put(tmp_path / "run", job(7), tmp_path / "0")
    followers = [LogFollower(folder, rank=0, attempt=0)]
    for n in range(7, 15):
        put(tmp_path / "run", job(n), tmp_path / str(n))
        if n == 10:
            followers.append(LogFollower(folder, rank=0, attempt=0))
            for number in (0, 1):
                segment = folder / paths.segment_name(number)
                paths.archive_of(segment).write_bytes(
                    archive.pack(segment.read_bytes()[: schema.HEADER_SIZE + 8 * schema.RECORD_SIZE])
                )
                segment.unlink()
            monkeypatch.setattr(builders, "write_run", _without_first_segments(builders.write_run))
        counts.append([len(poll(follower).tables.operations) for follower in followers])
    assert [row[0] for row in counts] == [14, *[2] * 7]
    assert [row[1] for row in counts if len(row) == 2] == [20, *[2] * 4]
    assert all(poll(follower).lost == 0 for follower in followers)
    for follower in followers:
        assert len(follower._windows) <= 2
        follower.close()


def _without_first_segments(write: object) -> object:
    def wrapped(folder: Path, ranks: list[RankBuilder]) -> Path:
        run: Path = write(folder, ranks)  # type: ignore[operator]
        for number in (0, 1):
            (run / "rank-00000.0" / paths.segment_name(number)).unlink()
        return run

    return wrapped


def test_dropped_segments_are_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", 8)
    folder = put(tmp_path / "run", job(12), tmp_path / "0")  # 60 records: segments 0 to 7
    for number in (2, 3):
        (folder / paths.segment_name(number)).unlink()
    grown = poll(LogFollower(folder, rank=0, attempt=0))
    assert grown.lost == 16
    assert len(grown.tables.operations) + len(grown.tables.spans) + len(grown.tables.samples) == 44


def test_reused_segment_is_not_taken_for_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", 8)
    folder = put(tmp_path / "run", job(2, last_is_open=True), tmp_path / "0")
    follower = LogFollower(folder, rank=0, attempt=0)
    assert len(poll(follower).open_operations) == 1
    put(tmp_path / "run", job(3), tmp_path / "1")  # 15 records: segments 0 and 1
    (folder / paths.segment_name(1)).replace(tmp_path / "segment-1")
    with (folder / paths.segment_name(0)).open("r+b") as file:  # in place, as the recorder does
        file.write((tmp_path / "segment-1").read_bytes())
    (folder / paths.segment_name(0)).rename(folder / paths.segment_name(1))
    grown = poll(follower)
    assert grown.lost > 0
    assert set(grown.tables.operations["step"].tolist()) <= {1, 2}


def test_from_the_end_only_what_comes_later_is_given(tmp_path: Path) -> None:
    put(tmp_path / "run", job(5), tmp_path / "0")
    follower = RunFollower(tmp_path / "run", from_end=True)
    assert len(follower.poll()[0].tables.operations) == 0
    put(tmp_path / "run", job(6), tmp_path / "1")
    grown = follower.poll()[0]
    assert set(grown.tables.operations["step"].tolist()) == {5}
    assert grown.tables.ops[grown.tables.operations["op"][0]] == "all_reduce"
    follower.close()


@pytest.mark.parametrize("newest", [1, 4, 7, 11, 15])
def test_only_so_many_of_the_records_that_are_there_are_given(
    newest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", 8)
    folder = put(tmp_path / "run", job(6), tmp_path / "0")  # 30 records: 6 in the newest segment
    follower = LogFollower(folder, rank=0, attempt=0, newest=newest)
    grown = poll(follower)
    assert len(grown.tables.operations) + len(grown.tables.spans) + len(grown.tables.samples) == min(newest, 14)
    assert grown.lost == 0
    put(tmp_path / "run", job(7), tmp_path / "1")
    assert len(poll(follower).tables.operations) == 2


def test_ranks_come_up_later_and_with_a_new_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    follower = RunFollower(run)
    assert follower.poll() == {}
    put(run, job(2), tmp_path / "0")
    assert list(follower.poll()) == [0]
    again = job(3)
    again.attempt = 1
    put(run, again, tmp_path / "1")
    grown = follower.poll()[0]
    assert grown.tables.attempt == 1
    assert len(grown.tables.operations) == 6


def test_ranks_of_another_host_are_left_alone(tmp_path: Path) -> None:
    put(tmp_path / "run", job(2), tmp_path / "0")
    assert RunFollower(tmp_path / "run", boot_id="boot-b").poll() == {}
    assert list(RunFollower(tmp_path / "run", boot_id="boot-a").poll()) == [0]


def test_names_in_a_run_of_many_hosts_are_made_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_out: list[str] = []
    parse = paths.parse_rank_folder

    def noted(name: str) -> tuple[int, int] | None:
        made_out.append(name)
        return parse(name)

    monkeypatch.setattr(paths, "parse_rank_folder", noted)
    run = tmp_path / "run"
    builders.write_run(run, [RankBuilder(rank, 3, boot_id=f"boot-{rank}") for rank in range(3)])
    (run / paths.rank_folder_name(3, 0)).mkdir()  # has no header yet: nobody knows whose it is
    follower = RunFollower(run, boot_id="boot-1")
    assert list(follower.poll()) == [1]
    assert set(made_out) >= {paths.rank_folder_name(rank, 0) for rank in range(4)}
    made_out.clear()
    assert list(follower.poll()) == [1]
    assert made_out == [paths.rank_folder_name(3, 0)]
    put(run, RankBuilder(3, 4, boot_id="boot-1", closed=False), tmp_path / "scratch")
    assert list(follower.poll()) == [1, 3]


def test_records_far_behind_settle_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_follower, "MAX_OPEN", 10)
    rank = RankBuilder(0, 1, closed=False)
    rank.span("user", 0)
    for i in range(20):
        rank.op("barrier", i * 1000, i * 1000 + 1)
    grown = poll(LogFollower(put(tmp_path / "run", rank, tmp_path / "0"), rank=0, attempt=0))
    assert len(grown.tables.spans) == 1
    assert len(grown.open_spans) == 0


def test_newer_format_is_reported_once_and_the_other_ranks_go_on(tmp_path: Path) -> None:
    for number in range(2):
        rank = job(2)
        rank.rank = number
        put(tmp_path / "run", rank, tmp_path / str(number))
    with (tmp_path / "run/rank-00001.0/events.00000").open("r+b") as file:
        file.seek(schema.HEADER_OFFSET["format_version"])
        file.write((99).to_bytes(4, "little"))
    follower = RunFollower(tmp_path / "run")
    assert list(follower.poll()) == [0]
    assert "format 99" in follower.problems[1]


def as_lists(growth: Growth) -> list[object]:
    """Return all rows of what a rank has gained."""
    known = growth.tables
    rows = (known.operations, known.spans, known.samples, growth.open_operations, growth.open_spans)
    return [growth.newest_ns, growth.is_whole, *(table.tolist() for table in rows)]


@pytest.mark.parametrize("most_together", [1 << 14, 8])
@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_followed_together_gain_what_each_gains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_together: int, damaged: bool
) -> None:
    for module in (run_follower, short_logs):
        monkeypatch.setattr(module, "MOST_TOGETHER", most_together)
    run = tmp_path / "run"
    together = RunFollower(run)
    alone: dict[int, LogFollower] = {}
    for turn in range(3):
        for number in range(4):
            rank = job(turn * (number + 1), last_is_open=number % 2 == 0)
            rank.rank = number
            folder = put(run, rank, tmp_path / f"{turn}-{number}")
            alone.setdefault(number, LogFollower(folder, rank=number, attempt=0))
        if damaged and turn == 1:
            with (run / "rank-00002.0/events.00000").open("r+b") as file:
                file.seek(schema.HEADER_SIZE + schema.OFFSET["kind"])
                file.write(b"\x63")
        found = together.poll()
        assert {rank: as_lists(growth) for rank, growth in found.items()} == {
            rank: as_lists(poll(log)) for rank, log in alone.items()
        }
    assert len(found[3].tables.operations) > 0


def test_any_cut_of_the_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = put(tmp_path / "run", job(1), tmp_path / "0")
    segment = folder / paths.segment_name(0)
    whole = segment.read_bytes()[: schema.HEADER_SIZE + 6 * schema.RECORD_SIZE]
    for size in itertools.chain(range(0, 200, 7), range(schema.HEADER_SIZE - 3, len(whole), 13)):
        segment.write_bytes(whole[:size])
        grown = poll(LogFollower(folder, rank=0, attempt=0))
        given = len(grown.tables.operations) + len(grown.tables.spans) + len(grown.tables.samples)
        assert given == max(0, min(5, (size - schema.HEADER_SIZE) // schema.RECORD_SIZE))
