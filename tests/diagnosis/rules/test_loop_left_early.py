"""A rank left a loop before the collective that always came there, and waits in what comes after the loop."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job


def leaving_a_loop(culprits: tuple[int, ...]) -> JobState:
    """Return two pairs that reduce in groups of their own in three rounds; culprits go to a barrier in the fourth."""
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        pairs = [rank.group("1", (0, 1)), rank.group("2", (2, 3))]
        for t in (0, 100, 200):
            rank.op(
                "all_reduce", t, t + 9, group=pairs[rank.rank // 2], site=rank.site("all_reduce", line=10), nbytes=8
            )
        if rank.rank in culprits:
            rank.op("barrier", 300, site=rank.site("barrier", line=20))
        else:
            rank.op("all_reduce", 300, group=pairs[rank.rank // 2], site=rank.site("all_reduce", line=10), nbytes=8)
    return build_job(ranks, exit_status=None)


def one_of_each_pair_left() -> JobState:
    return leaving_a_loop((1, 3))


def all_are_in_the_loop() -> JobState:
    return leaving_a_loop(())


FAULTY = {"rank-skipped-collective": one_of_each_pair_left}
SOUND = all_are_in_the_loop


def test_each_pair_of_which_one_left_the_loop_before_the_other_is_a_fault_of_its_own() -> None:
    findings = decide(leaving_a_loop((1, 3))).findings
    assert [(finding.kind, finding.culprit_ranks, finding.waiting_ranks) for finding in findings] == [
        ("rank-skipped-collective", (1,), (0,)),
        ("rank-skipped-collective", (3,), (2,)),
    ]


@pytest.mark.parametrize(("is_read", "culprits", "line"), [(True, (3,), 20), (False, (0, 1, 2), 10)])
def test_a_new_call_later_in_the_loop_is_of_its_round_and_skipped_by_who_is_in_the_next(
    is_read: bool, culprits: tuple[int, ...], line: int
) -> None:
    """Four gradients a round at line 10, then a norm at line 20 on a group of its own: rank 3 is at line 10 again."""
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        norms = rank.group("1", range(4))
        for number in range(4):
            site = rank.site("all_reduce", line=10)
            rank.op("all_reduce", 10 * number, 10 * number + 5, site=site, nbytes=8, step=0)
        if rank.rank == 3:
            rank.op("all_reduce", 100, site=rank.site("all_reduce", line=10), nbytes=8, step=1)
        else:
            rank.op("all_reduce", 100, group=norms, site=rank.site("all_reduce", line=20), nbytes=4, step=0)
    place = SourcePlace(in_loop=True, following=frozenset(), loops=((5, 30),))
    job = build_job(ranks, exit_status=None, find_place=lambda *_: place if is_read else None)
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", culprits)
    assert next(iter(finding.call_sites.values())).line == line
