"""Who came last on one node, from operations that settle in any order."""

import numpy as np

from dtprof.intervals import Column
from dtprof.job.groups import GroupId
from dtprof.monitor.prometheus.collective_arrivals import Arrivals

PAIR = GroupId.of("1", (0, 1))
ROOTED = np.zeros(1, np.bool_)


def operations(*rows: tuple[int, int, int]) -> Column:
    """Return collectives: position, when issued and when done."""
    return np.array([(*row, 0) for row in rows], np.int64).T


def test_operations_that_settle_out_of_order_are_paired_by_position_and_the_rest_is_kept() -> None:
    arrivals = Arrivals()
    arrivals.add(0, PAIR, operations((1, 100, 190), (0, 0, 90), (2, 200, 290)))
    arrivals.add(1, PAIR, operations((0, 30, 90), (1, 140, 190)))
    ((group, judged),) = arrivals.judge({PAIR: {0, 1}}, ROOTED)
    assert (group, judged.ranks, judged.last.tolist()) == (PAIR, [0, 1], [1, 1])
    assert judged.waited_ns.tolist() == [[30, 40], [0, 0]]  # rank 1 issues 30 and 40 ns after rank 0
    arrivals.add(1, PAIR, operations((2, 205, 290)))
    ((_, judged),) = arrivals.judge({PAIR: {0, 1}}, ROOTED)
    assert judged.waited_ns.tolist() == [[5], [0]]


def test_positions_of_a_group_made_again_do_not_meet_those_of_the_one_before() -> None:
    arrivals, again = Arrivals(), PAIR._replace(instance=1)
    arrivals.add(0, PAIR, operations((0, 0, 10)))
    arrivals.add(1, again, operations((0, 500, 510)))
    members = {PAIR: {0, 1}, again: {0, 1}}
    assert arrivals.judge(members, ROOTED) == []
    arrivals.add(1, PAIR, operations((0, 4, 10)))
    arrivals.add(0, again, operations((0, 493, 510)))
    waited = {group.instance: judged.waited_ns.tolist() for group, judged in arrivals.judge(members, ROOTED)}
    assert waited == {0: [[4], [0]], 1: [[7], [0]]}
