"""All members entered the same collective, and it does not complete."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.records.schema import FLAG
from tests.builders import RankBuilder
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


@pytest.mark.parametrize(("before", "early"), [(0, True), (1, False)])
def test_the_first_operation_of_a_group_on_devices_is_early_because_it_connects_the_group(
    before: int, early: bool
) -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    flags = FLAG["completion"] | FLAG["device"]
    for rank in ranks:
        site = rank.site("all_reduce", line=30)
        for i in range(before):
            rank.op("all_reduce", 100 + i, 200 + i, returned=101 + i, site=site, nbytes=64, flags=flags)
        rank.op("all_reduce", 1000, None, returned=1001, is_async=True, site=site, nbytes=64, flags=flags)
    (finding,) = found_by("backend_stall", build_job(ranks, exit_status=None))
    assert finding.is_early is early
    assert any("connects" in fact for fact in finding.evidence) is early
