"""In what members of a collective disagree, and who is in the minority."""

from collections.abc import Callable

import pytest

from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.job.agreement import Disagreement, find_disagreement
from dtprof.job.group_collectives import group_tables
from tests.builders import RankBuilder


def compare(count: int, call: Callable[[RankBuilder], None]) -> Disagreement | None:
    """Return where ranks disagree that make two calls alike, and then one of their own."""
    ranks = {}
    for number in range(count):
        builder = RankBuilder(number, count)
        for t in (0, 100):
            builder.op("all_reduce", t, t + 10, nbytes=8, site=builder.site(line=3))
        call(builder)
        ranks[number] = rank_state(builder.tables(), exit=None, stack=None, alive=None)
    ((group, tables),) = group_tables(ranks).items()
    return find_disagreement(ranks, group, tables)


def test_the_fewer_are_the_minority() -> None:
    found = compare(5, lambda rank: rank.op("broadcast", 200, 210, nbytes=8, peer=1 if rank.rank in (2, 4) else 0))
    assert found is not None
    assert (found.argument, found.seq, found.minority, found.is_tie) == ("peer", 2, (2, 4), False)
    assert found.values == {0: 0, 1: 0, 2: 1, 3: 0, 4: 1}


def test_of_two_halves_the_one_that_makes_its_call_for_the_first_time_is_the_minority() -> None:
    def call(rank: RankBuilder) -> None:
        rank.op("all_reduce", 200, 210, nbytes=16 if rank.rank else 8, site=rank.site(line=3))

    found = compare(2, call)
    assert found is not None
    assert (found.argument, found.minority, found.is_new, found.is_tie) == ("numel", (1,), True, False)


def test_of_two_halves_that_both_make_a_new_call_nobody_knows_which_is_wrong() -> None:
    found = compare(2, lambda rank: rank.op("reduce" if rank.rank else "broadcast", 200, 210, nbytes=8, peer=0))
    assert found is not None
    assert (found.argument, found.is_new, found.is_tie) == ("op", False, True)


def test_what_only_some_operations_ask_for_is_not_compared_for_others() -> None:
    def call(rank: RankBuilder) -> None:
        rank.op("all_gather", 200, 210, nbytes=8 * (rank.rank + 1))  # a list of tensors of any size
        rank.op("all_gather", 300, 310, nbytes=8, reduce_op="max" if rank.rank else "sum")

    assert compare(3, call) is None


def test_an_exchange_is_compared_by_what_each_pair_sends_and_expects() -> None:
    def call(rank: RankBuilder, sent_by_2: int) -> None:
        sent = (1, 2, 3) if rank.rank != 2 else (1, sent_by_2, 3)
        rank.sizes[7] = (sent, (rank.rank + 1,) * 3)  # each expects as much from all as its number says
        rank.op("all_to_all", 200, 210, nbytes=sum(sent), tag=7)

    assert compare(3, lambda rank: call(rank, 2)) is None
    found = compare(3, lambda rank: call(rank, 5))
    assert found is not None
    assert (found.argument, found.bad_pairs, found.minority) == ("sizes", [(2, 1, 5, 2)], (1, 2))


@pytest.mark.parametrize(("wanted", "pairs"), [(1, None), (2, [(0, 1, 4, 8)])])
def test_even_shares_are_compared_with_splits_that_count_rows(
    wanted: int, pairs: list[tuple[int, int, int, int]] | None
) -> None:
    """Rows have 4 elements. Rank 0 has one for each, and one of each: even shares are recorded without splits."""

    def call(rank: RankBuilder) -> None:
        if rank.rank:
            rows = (1, 0, 2) if rank.rank == 1 else (1, 2, 0)
            rank.sizes[7] = (rows, (wanted, 0, 2) if rank.rank == 1 else rows)
        rank.op("all_to_all", 200, 210, nbytes=12, tag=7 if rank.rank else 0)

    found = compare(3, call)
    assert (found and found.bad_pairs) == pairs


@pytest.mark.parametrize(
    ("earlier", "newest", "minority"),
    [
        ([(1, 2, 3)] * 3, (1, 5, 3), (2,)),  # sends more than ever
        ([(1, 5, 3)] * 3, (1, 5, 3), (1,)),  # sends as ever: rank 1 expected as much, and does no more
        ([(1, 5, 3), (3, 5, 1), (2, 5, 2)], (3, 5, 9), (1,)),  # its share for rank 1 is as ever, whatever the total
        ([(1, 2, 6), (3, 3, 3), (2, 6, 1)], (1, 5, 3), (1,)),  # routed otherwise each time, as much as ever in all
        ([(1, 2, 6), (3, 3, 3), (2, 6, 1)], (1, 5, 4), (2,)),  # more than ever in all
        ([(1, 2, 6), (3, 3, 1), (2, 6, 1)], (1, 5, 4), (1, 2)),  # of any size: nobody knows
        ([(1, 3, 2)] * 3, (1, 5, 2), (2,)),  # both leave their share, and it sends more than ever in all
        ([(1, 3, 2)] * 3, (1, 5, 0), (1,)),  # both do, and it sends as much as ever in all
        ([(1, 2, 3)], (1, 5, 3), (1, 2)),  # too few to tell
    ],
)
def test_of_one_pair_that_does_not_fit_the_rank_that_leaves_its_pattern_is_the_minority(
    earlier: list[tuple[int, int, int]], newest: tuple[int, int, int], minority: tuple[int, ...]
) -> None:
    """Rank 2 sends rank 1 five elements, which expects two, after exchanges at the same line that did fit."""

    def call(rank: RankBuilder) -> None:
        for number, sent in enumerate([*earlier, newest]):
            wanted = 2 if rank.rank == 1 and number == len(earlier) else sent[rank.rank]
            own = sent if rank.rank == 2 else (1, 1, 1)
            rank.sizes[number] = (own, (1, 1, wanted))
            t = 200 + 100 * number
            rank.op("all_to_all", t, t + 10, nbytes=sum(own), tag=number, site=rank.site(line=9))

    found = compare(3, call)
    assert found is not None
    assert (found.argument, found.bad_pairs, found.minority) == ("sizes", [(2, 1, 5, 2)], minority)
    assert found.has_changed == (len(minority) == 1)
