"""Calls in NCCL's own log that do not agree over the members of a communicator."""

from functools import partial

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import logged, stored_log


def alike_but_for_rank_3(*, numel: int = 8, dtype: int = 7, reduction: int = 0, root: int = 0) -> JobState:
    """Return a job of which rank 3 called NCCL so, the others as by default."""

    def call(rank: int, numel: int = 8, dtype: int = 7, reduction: int = 0, root: int = 0) -> str:
        arguments = f"count {numel} datatype {dtype} op {reduction} root {root}"
        comm = f"comm 0x55{rank} [nranks=4] stream 0x3"
        return f"host:900{rank}:1 [{rank}] NCCL INFO AllReduce: opCount 1 sendbuff 0x1 recvbuff 0x2 {arguments} {comm}"

    return logged("\n".join([*(call(rank) for rank in range(3)), call(3, numel, dtype, reduction, root)]))


FAULTY = {
    "collective-order-mismatch": partial(stored_log, "the-rank-that-calls-something-else-is-named"),
    "rank-skipped-collective": partial(stored_log, "a-call-left-out-or-made-once-too-often-is-told-from-a-mix-up"),
    "root-mismatch": partial(alike_but_for_rank_3, root=2),
    "dtype-mismatch": partial(alike_but_for_rank_3, dtype=6),
    "size-mismatch": partial(alike_but_for_rank_3, numel=9),
    "reduce-op-mismatch": partial(alike_but_for_rank_3, reduction=1),
}
SOUND = alike_but_for_rank_3
