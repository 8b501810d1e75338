"""Positions that all members of a group have."""

import numpy as np
import pytest

from dtprof.intervals import Column
from dtprof.job.group_collectives import find_common

POSITIONS = {
    "the same": ([3, 4, 5], [3, 4, 5]),
    "of some the first are lost": ([0, 1, 2, 3, 4], [2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
    "one is missing": ([0, 1, 3, 4], [0, 1, 2, 3, 4]),
    "none in common": ([0, 1], [5, 6]),
    "none of one member": ([0, 1], []),
    "one twice": ([0, 1, 1, 2], [0, 1, 2]),
}


@pytest.mark.parametrize("seqs", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_each_member_gets_the_places_of_the_positions_that_all_have(seqs: tuple[list[int], ...], kind: type) -> None:
    columns: list[Column] = [np.array(own, kind) for own in seqs]
    common = sorted(set.intersection(*map(set, seqs)))
    for own, places in zip(columns, find_common(columns), strict=True):
        assert own[places].tolist() == common
