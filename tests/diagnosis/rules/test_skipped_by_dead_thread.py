"""A rank skipped the collectives of a group because the thread that made them ended by an exception."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.records.sites import Site
from dtprof.records.tables import ThreadException
from tests.builders import START_NS
from tests.diagnosis.judging import build_job, pair


def without_calls_of_a_thread(*, raised: bool) -> JobState:
    """Return a job in which the second thread of rank 2 makes no more calls, by an exception or for nothing known."""
    ranks = pair(3)
    for rank in ranks:
        reports = rank.group("reports", (0, 1, 2))
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, site=rank.site("all_reduce", line=10), nbytes=64)
            rank.op("all_reduce", t + 10, t + 19, site=rank.site("all_reduce", line=20), group=reports, thread=2)
        if rank.rank == 2:
            rank.op("barrier", 300, site=rank.site("barrier", line=30))
            frame = Site(file="/home/me/train.py", line=19, function="report")
            error = ThreadException(
                t_ns=START_NS + 290, type="KeyError", message="loss", traceback="", frame=frame, thread="report"
            )
            rank.thread_exceptions += [error] * raised
        else:
            rank.op("all_reduce", 310, site=rank.site("all_reduce", line=20), group=reports, thread=2)
    return build_job(ranks, exit_status=None)


def one_whose_thread_raised() -> JobState:
    return without_calls_of_a_thread(raised=True)


def one_whose_thread_is_late() -> JobState:
    return without_calls_of_a_thread(raised=False)


FAULTY = {"rank-skipped-collective": one_whose_thread_raised}
SOUND = one_whose_thread_is_late


@pytest.mark.parametrize(("raised", "kind"), [(True, "rank-skipped-collective"), (False, "group-order-inversion")])
def test_a_rank_whose_thread_died_skipped_the_calls_of_its_group(*, raised: bool, kind: str) -> None:
    finding = decide(without_calls_of_a_thread(raised=raised)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,))
    assert raised == (19 in {site.line for site in finding.culprit_call_sites.values()})
