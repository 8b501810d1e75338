"""A rank ended without a collective of an earlier round, and its peers wait for it in that collective."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from tests.diagnosis.judging import STEP, build_job, pair


def ending_one_broadcast_short(*, by_all: bool) -> JobState:
    """Return a job in which rank 2 sends without the weights of round 3, and ends; or all did so, and it only left."""
    ranks = pair(3)
    for rank in ranks:
        weights, sent = rank.site("broadcast", line=10), rank.site("send", line=20)
        for i in range(6):
            t, is_last = i * STEP, i == 5
            if i != 3 or (rank.rank != 2 and not by_all):
                is_open = is_last and rank.rank != 2
                if not (is_last and by_all and rank.rank == 2):
                    rank.op("broadcast", t, None if is_open else t + 9, site=weights, nbytes=8, peer=0)
            if not (is_last and (rank.rank != 2 or by_all)):
                rank.op("send", t + 20, t + 29, peer=(rank.rank + 1) % 3, site=sent, nbytes=8)
    ranks[2].closed = True
    return build_job(ranks, statuses={2: (0, 6 * STEP)})


def one_that_skipped_a_broadcast() -> JobState:
    return ending_one_broadcast_short(by_all=False)


def one_that_left_early() -> JobState:
    return ending_one_broadcast_short(by_all=True)


FAULTY = {"rank-skipped-collective": one_that_skipped_a_broadcast}
SOUND = one_that_left_early


@pytest.mark.parametrize(("by_all", "kind"), [(False, "rank-skipped-collective"), (True, "rank-exited")])
def test_a_collective_skipped_in_an_earlier_iteration_explains_the_wait_for_a_rank_that_exited(
    *, by_all: bool, kind: str
) -> None:
    finding = decide(ending_one_broadcast_short(by_all=by_all)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,))
    if not by_all:
        assert (finding.op, finding.seq, finding.waiting_ranks) == ("broadcast", 3, (0, 1))
