"""Others wait for ranks of which only operations are known."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dtprof.diagnosis.job_state import JobState
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, gradients, loss, message, pair, ranks_in_step


def as_dumped(ranks: Sequence[RankBuilder]) -> JobState:
    """Return a job of which only operations are known, as dumps have them."""
    job = build_job(ranks, exit_status=None)
    return replace(job, ranks={rank: replace(state, sees_program=False) for rank, state in job.ranks.items()})


def without(*absent: int) -> JobState:
    ranks = ranks_in_step(4, 3)
    for rank in ranks:
        if rank.rank not in absent:
            gradients(rank, 3000, done=False)
    return as_dumped(ranks)


def a_message_nobody_sends() -> JobState:
    ranks = pair()
    message(ranks[0], "recv", 1, 100, line=4)
    loss(ranks[1], 0, done=True)
    loss(ranks[0], 0, done=True)
    return as_dumped(ranks)


def none_absent() -> JobState:
    return without()


FAULTY = {
    "rank-skipped-collective": partial(without, 2),
    "collective-order-mismatch": partial(without, 1, 2, 3),
    "p2p-unmatched": a_message_nobody_sends,
}
SOUND = none_absent


def test_the_rank_that_never_came_is_named_with_its_last_line() -> None:
    (finding,) = found_by("rank_never_came", without(2))
    assert (finding.culprit_ranks, finding.waiting_ranks, finding.seq) == ((2,), (0, 1, 3), 6)
    assert (finding.culprit_call_sites[2].line, finding.call_sites[0].line) == (20, 10)


def test_a_call_that_most_never_came_to_is_one_too_many_on_those_that_made_it() -> None:
    (finding,) = found_by("rank_never_came", without(1, 2, 3))
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((0,), (0,))
