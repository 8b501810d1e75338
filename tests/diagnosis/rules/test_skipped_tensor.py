"""A rank skipped one tensor of a loop over tensors: its call met one of another size."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from tests.diagnosis.judging import build_job, pair


def with_second_shard_of(size: int) -> JobState:
    """Return a job in which rank 0 scatters shards of 8, 6 and 3; gloo aborts rank 2, whose second has another size."""
    ranks = pair(3)
    for rank in ranks:
        site = rank.site("scatter", line=10)
        for i, shard in enumerate((8, 6, 3)):
            is_root, is_odd = rank.rank == 0, rank.rank == 2 and i == 1
            is_open = is_odd or (is_root and i == 2)
            given = size if is_odd else shard * (3 if is_root else 1)
            rank.op("scatter", 100 * i, None if is_open else 100 * i + 9, site=site, nbytes=given, peer=0)
            if is_odd:
                break
    statuses = {0: (1, 400), 1: (-15, 500), 2: (-6, 300)}
    return build_job(ranks, statuses=statuses)


def one_that_skipped_the_second_shard() -> JobState:
    return with_second_shard_of(3)


def one_of_a_wrong_size() -> JobState:
    return with_second_shard_of(5)


FAULTY = {"rank-skipped-collective": one_that_skipped_the_second_shard}
SOUND = one_of_a_wrong_size


@pytest.mark.parametrize(("size", "kind"), [(3, "rank-skipped-collective"), (5, "size-mismatch")])
def test_the_size_of_the_next_call_reveals_a_skipped_tensor(size: int, kind: str) -> None:
    finding = decide(with_second_shard_of(size)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,))
