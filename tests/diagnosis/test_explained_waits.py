"""What a cause explains: waits in its own operation, not in the one of that number of a group created anew."""

from dataclasses import replace

import pytest

from dtprof.diagnosis.explained_waits import find_explained, find_unexplained_waits
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import RankState, assemble_job
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.manifest import Manifest
from dtprof.records.tables import ProcessExit

FIRST, AGAIN = (GroupId.of("team", range(4), instance=instance) for instance in (0, 1))


def waiting(rank: int, group: GroupId) -> RankState:
    """Return a rank that waits in collective 7 of a group."""
    open_operation = Operation(
        group=group, op="all_reduce", seq=7, p2p=False, done=False, issued_ns=1, observed=True, inside_call=True
    )
    counts = {(FIRST, False): 8, (AGAIN, False): 8}
    return RankState(
        rank=rank, attempt=0, pid=rank, host="a", last_ns=1, counts=counts, open_operations=(open_operation,)
    )


def absent(rank: int, group: GroupId) -> RankState:
    """Return a rank that has not come to collective 7 of a group."""
    counts = {(FIRST, False): 8, (AGAIN, False): 8, (group, False): 7}
    return RankState(rank=rank, attempt=0, pid=rank, host="a", last_ns=1, counts=counts)


def test_a_wait_in_a_group_that_was_created_again_is_not_explained_by_the_first_one() -> None:
    job = assemble_job(
        [waiting(0, FIRST), waiting(1, AGAIN), absent(2, FIRST), absent(3, AGAIN)],
        world_size=4,
        manifest=Manifest(),
        stalled=True,
        stopped_on_hang_ns=None,
    )
    skipped = {
        group: Finding(
            kind="rank-skipped-collective",
            summary="",
            grade=1.0,
            culprit_ranks=culprits,
            waiting_ranks=(0, 1),
            group=job.group(group),
            seq=7,
        )
        for group, culprits in ((FIRST, (2,)), (AGAIN, (3,)))
    }
    assert find_explained(job, skipped[FIRST]) == {0, 2}
    assert find_explained(job, skipped[AGAIN]) == {1, 3}


@pytest.mark.parametrize(("threshold_s", "unexplained"), [("4", {0}), ("30", set())])
def test_a_wait_of_half_the_threshold_at_which_dtprof_stopped_the_job_is_long(
    threshold_s: str, unexplained: set[int]
) -> None:
    ended = ProcessExit(pid=0, status=-15, t_ns=3_100_000_000)  # a wait of 3.1 s; dtprof stopped the job after 3 s
    job = assemble_job(
        [replace(waiting(0, FIRST), exit=ended), absent(1, FIRST)],
        world_size=2,
        manifest=Manifest(settings={"hang_after_s": threshold_s}),
        stalled=True,
        stopped_on_hang_ns=3_000_000_000,
    )
    assert set(find_unexplained_waits(job)) == unexplained
