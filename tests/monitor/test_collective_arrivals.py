"""How long ranks of one node waited for the last, in collectives that all of them have ended."""

import numpy as np

from dtprof.job.groups import GroupId
from dtprof.job.streamed_matching import MatchedCollectives
from dtprof.monitor.prometheus.collective_arrivals import measure_waits

ROOTED = np.array([False, True])  # operation 1 has a root


def test_members_wait_for_the_last_but_in_a_rooted_collective_that_ended_before() -> None:
    rows = [
        np.array(own, np.int64).T for own in ([(0, 0, 90, 0), (1, 100, 120, 1)], [(0, 30, 90, 0), (1, 140, 190, 1)])
    ]
    matched = MatchedCollectives(group=GroupId.of("1", (0, 1)), ranks=[0, 1], rows=rows)
    waits = measure_waits(matched, ROOTED)
    assert (waits.ops.tolist(), waits.last.tolist()) == ([0, 1], [1, 1])
    assert waits.waited_ns.tolist() == [[30, 0], [0, 0]]  # rank 0 ends the broadcast 20 ns before rank 1 comes
