"""Ranks entered two groups in opposite orders, and it went well."""

import pytest

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rules.group_order_risk import find_order_risk
from tests.diagnosis.judging import build_job, in_two_groups, judge
from tests.job.test_order_replay import job_of


def opposite_orders() -> JobState:
    return build_job(in_two_groups(["ab", "ab", "ba"], done=True), exit_status=0, stalled=False)


def the_same_order() -> JobState:
    return build_job(in_two_groups(["ab", "ab", "ab"], done=True), exit_status=0, stalled=False)


FAULTY = {"group-order-risk": opposite_orders}
SOUND = the_same_order


def test_the_same_inversion_that_went_well_is_a_risk_and_the_same_order_is_none() -> None:
    verdict = judge(in_two_groups(["ab", "ab", "ba"], done=True), exit_status=0, stalled=False)
    assert (verdict.outcome, verdict.findings[0].kind) == ("risk", "group-order-risk")
    assert verdict.findings[0].severity == "warning"
    assert verdict.findings[0].culprit_ranks == (2,)  # the fewest
    assert judge(in_two_groups(["ab", "ba"], done=True), exit_status=0, stalled=False).findings[0].culprit_ranks == (
        0,
        1,
    )
    assert judge(in_two_groups(["ab", "ab", "ab"], done=True), exit_status=0, stalled=False).findings == ()


def test_groups_that_two_threads_of_a_rank_enter_in_any_order_are_no_risk() -> None:
    ranks = in_two_groups(["ab", "ab", "ab"], done=True)
    for rank in ranks:
        for i in range(4):
            late = (i + rank.rank) % 2
            rank.op("all_reduce", 3000 + 10 * i, 3100, thread=1, group=1, nbytes=8)
            rank.op("all_reduce", 2999 + 10 * i + 5 * late, 3100, thread=2, group=2, nbytes=8)
    assert judge(ranks, exit_status=0, stalled=False).findings == ()


@pytest.mark.parametrize(("programs", "kinds"), [(("ac", "ba", "cb"), ["group-order-risk"]), (("ac", "ab", "cb"), [])])
def test_three_groups_that_are_entered_in_a_ring_are_a_risk_for_all_in_it(
    programs: tuple[str, ...], kinds: list[str]
) -> None:
    found = find_order_risk(Case(job_of(dict(enumerate(programs)))))
    assert [finding.kind for finding in found] == kinds
    assert [finding.culprit_ranks for finding in found] == [(0, 1, 2)] * len(kinds)


def test_who_leaves_the_order_of_its_own_rounds_closes_the_ring() -> None:
    usual = {0: "ac", 1: "ab", 2: "bc"}
    programs = {rank: order * 3 for rank, order in usual.items()}
    programs[0] = "acacca"
    (finding,) = find_order_risk(Case(job_of(programs)))
    assert (finding.culprit_ranks, finding.confidence) == ((0,), 0.85)
    assert "rank 0 leaves the order of earlier rounds" in finding.summary
