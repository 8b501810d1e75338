"""In which order pairs of ranks are timed."""

import pytest

from dtprof.launch.rank_probe.link_timings import pair_rounds


@pytest.mark.parametrize("ranks", [2, 3, 12, 13, 16, 33])
def test_every_pair_of_ranks_meets_once_and_a_rank_is_in_one_pair_of_a_round(ranks: int) -> None:
    rounds = pair_rounds(range(ranks))
    pairs = [pair for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) == ranks * (ranks - 1) // 2
    assert all(a < b for a, b in pairs)
    for one in rounds:
        met = [rank for pair in one for rank in pair]
        assert len(met) == len(set(met))
    assert max(map(len, rounds)) == (1 if ranks <= 12 else ranks // 2)
