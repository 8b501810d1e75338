"""Several threads issue on one group by turns."""

from collections.abc import Sequence

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.records.schema import FLAG
from tests.diagnosis.judging import build_job, judge_success, with_threads


def threads_by_turns() -> JobState:
    return build_job(with_threads(("ababab", "ababab")), exit_status=0, stalled=False)


def a_group_handed_over_once() -> JobState:
    return build_job(with_threads(("aaabbb", "aaabbb")), exit_status=0, stalled=False)


FAULTY = {"shared-group": threads_by_turns}
SOUND = a_group_handed_over_once


@pytest.mark.parametrize(
    ("orders", "found"),
    [
        (("ababab", "ababab"), [("shared-group", "info")]),
        (("aaabbb", "aaabbb"), []),  # handed over once
        (("abababab", "abbaabab"), [("step-mismatch", "error")]),
    ],
)
def test_threads_that_share_a_group_are_noted_and_an_error_where_their_calls_met(
    orders: Sequence[str], found: list[tuple[str, str]]
) -> None:
    verdict = judge_success(with_threads(orders))
    assert [(finding.kind, finding.severity) for finding in verdict.findings] == found


def test_the_thread_of_autograd_does_not_count() -> None:
    assert judge_success(with_threads(("ababab", "ababab"), flags=FLAG["inferred_site"])).findings == ()
