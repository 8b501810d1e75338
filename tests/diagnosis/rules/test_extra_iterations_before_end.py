"""Ranks that wait in one more call than most, which made all of theirs and ended."""

import functools

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job


def one_call_ahead(enders: int = 2, line: int = 9) -> JobState:
    """Return ranks of which some end after 5 calls, and the others wait in one more, at a line."""
    ranks = [RankBuilder(rank, 3, closed=rank < enders) for rank in range(3)]
    for rank in ranks:
        for i in range(5):
            rank.op("all_reduce", 100 * i, 100 * i + 9, site=rank.site("all_reduce", line=9), nbytes=8)
        if rank.rank >= enders:
            rank.op("all_reduce", 600, site=rank.site("all_reduce", line=line), nbytes=8)
    return build_job(ranks, exit_status=None)


FAULTY = {"step-mismatch": one_call_ahead}
SOUND = functools.partial(one_call_ahead, enders=1)


@pytest.mark.parametrize(
    ("enders", "line", "kind"), [(2, 9, "step-mismatch"), (2, 30, "rank-exited"), (1, 9, "rank-exited")]
)
def test_a_rank_one_iteration_ahead_of_most_made_an_extra_one(enders: int, line: int, kind: str) -> None:
    (finding, *_) = decide(one_call_ahead(enders, line)).findings
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,) if kind == "step-mismatch" else (*range(enders),))
