"""Threads issue on one group in an order that differs between ranks."""

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import build_job, judge_success, with_threads


def orders_that_differ() -> JobState:
    return build_job(with_threads(("abababab", "abbaabab")), exit_status=0, stalled=False)


def orders_that_agree() -> JobState:
    return build_job(with_threads(("abababab", "abababab")), exit_status=0, stalled=False)


FAULTY = {"step-mismatch": orders_that_differ}
SOUND = orders_that_agree


def test_the_first_position_at_which_calls_of_two_threads_met_is_named() -> None:
    finding = judge_success(with_threads(("abababab", "abbaabab"))).findings[0]
    assert (finding.seq, finding.culprit_ranks) == (2, (0, 1))
    assert {site.line for site in finding.culprit_call_sites.values()} == {10, 20}
