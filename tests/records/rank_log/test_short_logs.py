"""Ranks read several at a time: each must come as it does when it is read alone, whatever its neighbours are."""

import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from dtprof.records import paths, reader, schema
from dtprof.records.rank_log.archive import archive_segment
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests.records.segments import fill_up, overwrite, record, write_rank

NUM_RANKS = 6


def write_random_rank(run: Path, rank: int, chance: random.Random) -> Path:
    """Write a rank with some records of every kind, also unwritten ones, in no order of time."""
    records = [
        record(
            kind=chance.choice(list(schema.KIND.values())),
            state=chance.choice(list(schema.STATE.values())),
            op=chance.randrange(3),
            issued_ns=chance.randrange(1, 1_000),
            done_after=float(chance.randrange(-1, 500)),
            waits=chance.randrange(2),
            waited_from=float(chance.randrange(100)),
            waited_for=float(chance.randrange(100)),
            numel=chance.randrange(1_000),
            step=chance.randrange(5),
        )
        if chance.random() < 0.9
        else bytes(schema.RECORD_SIZE)
        for _ in range(chance.randrange(12))
    ]
    for number in range(2):
        segment = write_rank(run, records[number::2], rank=rank, segment=number, world_size=NUM_RANKS)
        fill_up(segment)
    return segment


def assert_same(found: RankTables, alone: RankTables) -> None:
    """Compare every field."""
    for field in fields(RankTables):
        one, other = getattr(found, field.name), getattr(alone, field.name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=field.name)
        else:
            assert one == other, field.name


def assert_each_as_alone(folder: Path) -> None:
    """Read all ranks together, and each alone."""
    run = open_run(folder)
    order = [3, *(rank for rank in run.ranks if rank != 3)]
    found = list(run.load_each(order))
    assert [tables.rank for tables in found] == order
    for tables in found:
        assert_same(tables, run.load(tables.rank))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_read_together_come_as_each_does_alone(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for rank in range(NUM_RANKS):
        write_random_rank(tmp_path, rank, chance)
    assert_each_as_alone(tmp_path)


def test_device_times_reach_the_operations_of_their_own_rank(tmp_path: Path) -> None:
    for rank in range(4):
        operation = record(issued_ns=10, done_after=90.0, group=1, seq=5)
        measured = record(kind=schema.KIND["device_time"], issued_ns=20, group=1, seq=5, numel=30 + rank)
        fill_up(write_rank(tmp_path, [operation, measured][: 2 if rank % 2 else 1], rank=rank))
    assert_each_as_alone(tmp_path)
    device_ns = [tables.operations["device_ns"].tolist() for tables in open_run(tmp_path).load_each(range(4))]
    assert device_ns == [[-1], [31], [-1], [33]]


def test_damage_is_reported_the_rank_that_has_it(tmp_path: Path) -> None:
    chance = random.Random(1)
    for rank in range(NUM_RANKS):
        write_random_rank(tmp_path, rank, chance)
    fill_up(write_rank(tmp_path, [record(), record(kind=99), record(state=200)], rank=2))
    assert_each_as_alone(tmp_path)
    damaged = [tables.rank for tables in open_run(tmp_path).load_each(range(NUM_RANKS)) if tables.problems]
    assert damaged == [2]


def test_header_that_cannot_be_read_loses_only_its_own_segment(tmp_path: Path) -> None:
    chance = random.Random(2)
    for rank in range(NUM_RANKS):
        segment = write_random_rank(tmp_path, rank, chance)
        if rank == 4:
            overwrite(segment, schema.HEADER[0], b"nothing!")
    assert_each_as_alone(tmp_path)


def test_archives_and_long_logs_between_short_ones_keep_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MOST_SHORT", 64)
    monkeypatch.setattr(reader, "MOST_TOGETHER", 128)
    chance = random.Random(3)
    for rank in range(NUM_RANKS):
        segment = write_random_rank(tmp_path, rank, chance)
        if rank == 1:
            archive_segment(segment)
        if rank == 5:
            fill_up(write_rank(tmp_path, [record(issued_ns=i) for i in range(200)], rank=rank, segment=2))
    assert_each_as_alone(tmp_path)


def test_no_ranks_are_no_tables(tmp_path: Path) -> None:
    fill_up(write_rank(tmp_path, [record()], rank=0))
    assert list(open_run(tmp_path).load_each([])) == []


def test_lines_that_many_ranks_tell_are_each_rank_s_own(tmp_path: Path) -> None:
    line = b'{"k": "op", "id": 0, "name": "allreduce_"}\n'
    damaged = b'{"k": "op", "id": 1, "na\n'
    for rank, told in enumerate((line, line + damaged, line + line, damaged + b'{"k": "note", "text": "hello"}\n')):
        segment = write_rank(tmp_path, [record()], rank=rank)
        fill_up(segment)
        segment.with_name(paths.STRINGS).write_bytes(told)
    for _ in range(2):  # as read for the first time, and as known
        found = list(open_run(tmp_path).load_each(range(4)))
        assert [tables.raw_ops for tables in found] == [("allreduce_",)] * 3 + [()]
        assert [tables.notes for tables in found] == [()] * 3 + [("hello",)]
        assert [len(tables.problems) for tables in found] == [0, 1, 0, 1]
        assert found[1].problems[0] == f"rank-00001.0/{paths.STRINGS} holds 1 damaged lines, left out"
