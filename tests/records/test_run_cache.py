"""A run whose ranks are read once."""

from pathlib import Path

import numpy as np
import pytest

from dtprof.records.reader import open_run
from tests.builders import RankBuilder, write_run


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 110, 180, nbytes=64)
    return write_run(tmp_path / "run", ranks)


def test_a_rank_is_read_once_by_the_run_and_its_parts(run_directory: Path) -> None:
    run = open_run(run_directory).kept()
    first = run.load(0)
    assert first.operations["nbytes"].tolist() == [64]
    assert run.load(0) is first
    assert run.part([0]).load(0) is first
    assert [tables.rank for tables in run.load_all()] == [0, 1]
    assert [tables is run.load(tables.rank) for tables in run.load_each([1, 0])] == [True, True]
    assert run.load_newest(0, of_all=1, of_each=1) is first
    with pytest.raises(ValueError, match="read-only"):
        first.operations["nbytes"] = 0


def test_what_is_too_large_is_not_kept_and_another_attempt_neither(run_directory: Path) -> None:
    run = open_run(run_directory).kept()
    assert run.load(1, 0) is not run.load(1, 0)
    assert run.cache is not None
    run.cache.most_bytes = 1
    assert run.load(0) is not run.load(0)
    assert not run.cache.tables
    assert np.array_equal(run.load(0).operations, open_run(run_directory).load(0).operations)
