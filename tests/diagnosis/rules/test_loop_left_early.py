"""A rank left a loop before the collective that always came there, and waits in what comes after the loop."""

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
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
