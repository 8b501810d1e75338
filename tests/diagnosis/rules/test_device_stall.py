"""Some devices do not complete what those of the other members do."""

from dtprof.diagnosis.job_state import JobState
from dtprof.records.schema import FLAG
from tests.diagnosis.judging import build_job, found_by, ranks_in_step


def completed_on(*ranks_done: int) -> JobState:
    """Return ranks that all issued a collective on their devices, which completed on some."""
    ranks = ranks_in_step(4, 1)
    for rank in ranks:
        site = rank.site("all_reduce", line=30)
        done = 1200 if rank.rank in ranks_done else None
        flags = FLAG["completion"] | FLAG["device"]
        rank.op("all_reduce", 1100, done, returned=1101, is_async=True, site=site, nbytes=64, flags=flags)
    return build_job(ranks, exit_status=None)


def one_that_does_not_complete() -> JobState:
    return completed_on(0, 2, 3)


def all_that_complete() -> JobState:
    return completed_on(0, 1, 2, 3)


FAULTY = {"rank-stuck": one_that_does_not_complete}
SOUND = all_that_complete


def test_the_rank_whose_device_is_behind_is_named_and_not_those_that_completed() -> None:
    (finding,) = found_by("device_stall", one_that_does_not_complete())
    assert (finding.culprit_ranks, finding.waiting_ranks, finding.seq) == ((1,), (), 2)
    assert finding.culprit_call_sites[1].line == 30


def test_where_most_devices_are_behind_none_is_named() -> None:
    assert found_by("device_stall", completed_on(0)) == []
