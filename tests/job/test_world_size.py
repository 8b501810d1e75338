"""The number of ranks of a job."""

from pathlib import Path

from dtprof.job.world_size import MAX_WORLD_SIZE, read_world_size, resolve_world_size
from dtprof.records.reader import open_run
from tests.builders import RankBuilder, write_run


def test_all_ranks_declare_the_same() -> None:
    assert resolve_world_size([4, 4, 4, 4], range(4)) == 4


def test_ranks_that_left_no_record_count_as_others_declare_them() -> None:
    assert resolve_world_size([8, 8], [0, 1]) == 8


def test_one_damaged_header_neither_adds_nor_hides_ranks() -> None:
    assert resolve_world_size([4, 4, 4, 999], range(4)) == 4
    assert resolve_world_size([4, 1, 4, 4], range(4)) == 4
    assert resolve_world_size([MAX_WORLD_SIZE + 1, MAX_WORLD_SIZE + 1, 2], [0]) == 2


def test_a_rank_that_declares_itself_alone_does_not_outweigh_one_that_has_joined() -> None:
    assert resolve_world_size([1, 2], [0]) == 2


def test_a_size_that_is_not_known_yet_does_not_count() -> None:
    assert resolve_world_size([0, 0, 4], [0, 1, 2]) == 4


def test_a_rank_that_left_a_record_exists() -> None:
    assert resolve_world_size([2, 2], [0, 1, 6]) == 7
    assert resolve_world_size([], []) == 0


def test_an_elastic_restart_with_fewer_ranks_changes_the_size(tmp_path: Path) -> None:
    first = [RankBuilder(i, world_size=4) for i in range(4)]
    second = [RankBuilder(i, world_size=2, attempt=1) for i in range(2)]
    run = open_run(write_run(tmp_path / "run", [*first, *second]))
    assert read_world_size(run.folders) == 2


def test_headers_alone_tell_the_size(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", [RankBuilder(1, world_size=3)]))
    assert read_world_size(run.folders) == 3
    assert read_world_size({}) == 0
