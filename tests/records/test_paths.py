"""Names of files and folders of a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.records import paths


@given(st.integers(0, 10**7), st.integers(0, 1000))
def test_rank_folder_name_is_read_back(rank: int, attempt: int) -> None:
    assert paths.parse_rank_folder(paths.rank_folder_name(rank, attempt)) == (rank, attempt)


@pytest.mark.parametrize(
    "name", ["rank-1.0", "rank-00001", "rank-00001.", "rank-00001.x", "xrank-00001.0", "rank-00001.0~"]
)
def test_other_names_are_no_rank_folder(name: str) -> None:
    assert paths.parse_rank_folder(name) is None


def test_rank_folders_sort_by_rank() -> None:
    names = [paths.rank_folder_name(rank, 0) for rank in (0, 9, 10, 99_999)]
    assert names == sorted(names)


@given(st.text(min_size=1, max_size=40))
def test_node_folder_is_one_plain_name_whatever_the_host_is_called(host: str) -> None:
    name = paths.node_folder_name(host)
    assert name.startswith("node-")
    assert Path(name).name == name
    assert name.isascii()


def test_segments_come_in_the_order_of_their_numbers_beyond_five_digits(tmp_path: Path) -> None:
    for number in (100_000, 0, 99_999, 2):
        (tmp_path / paths.segment_name(number)).touch()
    for other in ("events.tmp", "events.00001.bak", paths.STRINGS):
        (tmp_path / other).touch()
    found = [path.name for path in paths.segment_files(tmp_path)]
    assert found == ["events.00000", "events.00002", "events.99999", "events.100000"]
