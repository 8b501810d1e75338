"""All members entered the same collective, and it does not complete."""

import pytest

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import build_job, found_by, gradients, judge, ranks_in_step


def all_in_one_collective(*, stopped_after_ns: int | None) -> JobState:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=False)
    if stopped_after_ns is None:
        return build_job(ranks, exit_status=None)
    return build_job(ranks, statuses=dict.fromkeys(range(3), (-15, 2100 + stopped_after_ns)))


def one_that_does_not_complete() -> JobState:
    return all_in_one_collective(stopped_after_ns=None)


def one_that_was_stopped_at_once() -> JobState:
    return all_in_one_collective(stopped_after_ns=800)


FAULTY = {"backend-stall": one_that_does_not_complete}
SOUND = one_that_was_stopped_at_once


@pytest.mark.parametrize(("ended", "kinds"), [(2900, []), (2_000_000_000, ["backend-stall"])])
def test_ranks_stopped_as_soon_as_all_had_come_may_have_gone_on(ended: int, kinds: list[str]) -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=False)
    verdict = judge(ranks, exit_status=1, statuses=dict.fromkeys(range(3), (-15, ended)))
    assert [finding.kind for finding in verdict.findings] == kinds
    assert verdict.outcome == ("hang" if kinds else "unknown")
    assert kinds or "stopped from outside" in verdict.cannot_tell[0]


def test_all_members_in_and_none_done_is_a_stall_of_the_back_end() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=False)
    finding = found_by("backend_stall", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("backend-stall", (), (0, 1, 2))
