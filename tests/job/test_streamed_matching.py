"""Collectives of a running job are matched by group and sequence number, in whatever order they settle."""

import numpy as np

from dtprof.intervals import Column
from dtprof.job.groups import GroupId
from dtprof.job.streamed_matching import StreamedMatching

PAIR = GroupId.of("1", (0, 1))


def operations(*rows: tuple[int, int]) -> Column:
    """Return collectives: sequence number, and when issued."""
    return np.array(rows, np.int64).T


def test_operations_that_settle_out_of_order_are_matched_by_sequence_number_and_the_rest_is_kept() -> None:
    matching = StreamedMatching()
    matching.add(0, PAIR, operations((1, 100), (0, 0), (2, 200)))
    matching.add(1, PAIR, operations((0, 30), (1, 140)))
    (matched,) = matching.take({PAIR: {0, 1}})
    assert (matched.group, matched.ranks) == (PAIR, [0, 1])
    assert matched.of_each(1).tolist() == [[0, 100], [30, 140]]
    matching.add(1, PAIR, operations((2, 205)))
    (matched,) = matching.take({PAIR: {0, 1}})
    assert matched.of_each(1).tolist() == [[200], [205]]
    assert not list(matching.take({PAIR: {0, 1}}))


def test_operations_of_a_group_made_again_do_not_match_those_of_the_one_before() -> None:
    matching, again = StreamedMatching(), PAIR._replace(instance=1)
    matching.add(0, PAIR, operations((0, 0)))
    matching.add(1, again, operations((0, 500)))
    members = {PAIR: {0, 1}, again: {0, 1}}
    assert not list(matching.take(members))
    matching.add(1, PAIR, operations((0, 4)))
    matching.add(0, again, operations((0, 493)))
    issued = {matched.group.instance: matched.of_each(1).tolist() for matched in matching.take(members)}
    assert issued == {0: [[0], [4]], 1: [[493], [500]]}


def test_a_member_that_never_comes_costs_bounded_memory() -> None:
    matching = StreamedMatching(max_held=2)
    matching.add(0, PAIR, operations((0, 0), (1, 10), (2, 20)))
    matching.add(1, PAIR, operations((0, 1), (1, 11), (2, 21)))
    (matched,) = matching.take({PAIR: {0, 1}})
    assert matched.of_each(0).tolist() == [[1, 2], [1, 2]]  # the oldest is given up
