"""What a cause explains: waits in its own operation, not in the one of that number of a group created anew."""

from dtprof.diagnosis.explained_waits import find_explained
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import RankState, assemble_job
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.tables import Manifest

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
            confidence=1.0,
            culprit_ranks=culprits,
            waiting_ranks=(0, 1),
            group=job.group(group),
            seq=7,
        )
        for group, culprits in ((FIRST, (2,)), (AGAIN, (3,)))
    }
    assert find_explained(job, skipped[FIRST]) == {0, 2}
    assert find_explained(job, skipped[AGAIN]) == {1, 3}
