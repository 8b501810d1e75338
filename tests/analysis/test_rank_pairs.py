"""Values of pairs of ranks, worked out by hand."""

from dtprof.analysis.communication.rank_pairs import MAX_PAIRED, pair_ranks


def test_pairs_are_listed_largest_first_and_the_largest_column_has_its_share() -> None:
    pairs = pair_ranks([4, 5, 7], {4: {5: 30, 7: 10}, 7: {5: 60, 9: 1000}})
    assert pairs is not None
    assert pairs.values.tolist() == [[0, 30, 10], [0, 0, 0], [0, 60, 0]], "rank 9 is none of these"
    assert pairs.largest == [(60, 7, 5), (30, 4, 5), (10, 4, 7)]
    assert pairs.top_column == (5, 0.9)  # 90 of 100


def test_without_values_or_with_too_many_ranks_there_are_no_pairs() -> None:
    assert pair_ranks([0, 1], {0: {}}) is None
    assert pair_ranks(range(MAX_PAIRED + 1), {0: {1: 5}}) is None
