"""NCCL's watchdog gave up on operations: which rank stood where."""

from functools import partial

from tests.diagnosis import log_texts as texts
from tests.diagnosis.judging import logged, stored_log

OTHER_OPERATION = "\n".join(
    f"{texts.watchdog(rank, op='BROADCAST' if rank == 2 else 'ALLREDUCE')}\n{texts.status(texts.STATUS_26, rank)}"
    for rank in range(4)
)
FAULTY = {
    "rank-skipped-collective": partial(stored_log, "rank-that-says-it-had-not-enqueued-is-behind"),
    "collective-order-mismatch": partial(logged, OTHER_OPERATION),
    "size-mismatch": partial(stored_log, "other-size-at-the-same-place-is-a-mismatch"),
    "backend-stall": partial(stored_log, "all-ranks-in-the-same-operation-is-no-ranks-fault"),
}
SOUND = partial(stored_log, "counters-alone-that-differ-accuse-nobody")
