"""Values of pairs of ranks, worked out by hand."""

from dtprof.analysis.communication.rank_pairs import MAX_PAIRED, pair_ranks


def test_pairs_are_listed_largest_first_and_the_largest_column_has_its_share() -> None:
    pairs = pair_ranks([4, 5, 7], {4: {5: 30, 7: 10}, 7: {5: 60, 9: 1000}})
    assert pairs is not None
    assert pairs.values.tolist() == [[0, 30, 10], [0, 0, 0], [0, 60, 0]], "rank 9 is none of these"
    assert pairs.largest == [(60, 2, 1), (30, 0, 1), (10, 0, 2)]
    assert pairs.top_column == (1, 0.9)  # 90 of 100
    assert [pairs.label(row) for row in range(3)] == ["rank 4", "rank 5", "rank 7"]


def test_without_values_there_are_no_pairs() -> None:
    assert pair_ranks([0, 1], {0: {}}) is None


def test_many_ranks_are_summed_along_the_axis_on_which_most_is_sent() -> None:
    # 4 stages of 100 ranks: each sends 5 to the next stage, and 1 to its neighbour along dp.
    ranks = range(400)
    places = {rank: {"pp": rank // 100, "dp": rank % 100} for rank in ranks}
    sent = {rank: {rank + 100: 5, rank // 100 * 100 + (rank + 1) % 100: 1} for rank in ranks}
    pairs = pair_ranks(ranks, sent, places)
    assert pairs is not None
    assert (pairs.unit, pairs.names) == ("pp", ("0", "1", "2", "3"))
    within, to_next = 100, 500
    assert pairs.values.tolist() == [
        [within, to_next, 0, 0],
        [0, within, to_next, 0],
        [0, 0, within, to_next],
        [0, 0, 0, within],
    ]
    assert pairs.averaged().values[0].tolist() == [1, 5, 0, 0]


def test_many_ranks_without_axes_are_summed_in_blocks_of_consecutive_ones() -> None:
    pairs = pair_ranks(range(MAX_PAIRED + 1), {0: {1: 5, 2: 3}, MAX_PAIRED: {0: 7}})
    assert pairs is not None
    assert (pairs.unit, pairs.names[:2], pairs.names[-1]) == ("ranks", ("0-1", "2-3"), "256-256")
    assert pairs.values[0, :2].tolist() == [5, 3]
    assert pairs.largest[0] == (7, 128, 0)
