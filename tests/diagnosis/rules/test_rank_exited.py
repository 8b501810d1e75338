"""A rank left with status 0 while others wait for it."""

import signal

import pytest

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import CONNECTION_LOST, build_job, found_by, gradients, judge, ranks_in_step, with_loaders


def leaving(*, early: bool) -> JobState:
    ranks = ranks_in_step(2, 2)
    ranks[0].closed = True
    if early:
        gradients(ranks[1], 2000, done=False)
    return build_job(ranks, exit_status=None)


def one_that_leaves_early() -> JobState:
    return leaving(early=True)


def one_that_ends_first() -> JobState:
    return leaving(early=False)


FAULTY = {"rank-exited": one_that_leaves_early}
SOUND = one_that_ends_first


def test_a_victim_that_aborts_after_its_exception_does_not_hide_the_rank_that_left() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[2].closed = True
    for victim in ranks[:2]:
        gradients(victim, 2000, done=False)
        victim.exception(2200, "RuntimeError", CONNECTION_LOST)
    finding = found_by(
        "rank_exited", build_job(ranks, statuses={0: (-signal.SIGABRT, 2600), 1: (-15, 2700), 2: (0, 2100)})
    )[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (2,), (0, 1))


def test_a_rank_that_left_with_status_0_while_others_wait_is_named() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[0].closed = True
    for waiting in ranks[1:]:
        gradients(waiting, 2000, done=False)
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-exited")
    assert verdict.findings[0].culprit_ranks == (0,)


@pytest.mark.parametrize(("end", "kind"), [(2050, "rank-exited"), (3_000_000_000, None)])
def test_a_rank_that_ended_before_others_lost_their_peer_has_exited_without_a_failed_operation(
    end: int, kind: str | None
) -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].closed = True
    ranks[1].span("data", end - 10, end)
    for rank in (ranks[0], ranks[2]):
        rank.exception(2100, "RuntimeError", CONNECTION_LOST, line=10)
    verdict = judge(ranks, statuses={0: (1, 2300), 1: (0, end + 100), 2: (1, 2300)}, stalled=False)
    assert [(f.kind, f.culprit_ranks) for f in verdict.findings] == ([(kind, (1,))] if kind else [])


def test_a_rank_that_ended_first_after_all_its_collectives_is_not_blamed() -> None:
    ranks = ranks_in_step(2, 2)
    ranks[0].closed = True  # rank 1 is still in its last all_reduce, which rank 0 has made
    last = ranks[1]
    site = last.site("all_reduce", line=20, function="average_loss")
    last.op("all_reduce", 1400, None, returned=1401, site=site, nbytes=8, seq=3)
    verdict = judge(ranks, exit_status=None, stalled=False)
    assert (verdict.outcome, verdict.findings) == ("healthy", ())


def test_a_rank_that_leaves_with_batches_left_has_exited() -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, False, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    assert found_by("rank_exited", build_job(ranks, exit_status=None))[0].kind == "rank-exited"


@pytest.mark.parametrize("missed", [False, True])
def test_a_rank_that_ended_before_an_operation_whose_failure_was_caught_is_named(*, missed: bool) -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.closed = True
        if rank.rank != 1 or not missed:
            rank.op("all_reduce", 2100, 2150, site=rank.site(line=10), state="failed")
    verdict = judge(ranks, exit_status=0, stalled=False)
    assert [(finding.kind, finding.culprit_ranks) for finding in verdict.findings] == [("rank-exited", (1,))] * missed
