"""Who waits where and for whom, from tracebacks of ranks whose operations failed."""

from functools import partial

from tests.diagnosis.judging import stored_log, written_log
from tests.diagnosis.log_texts import in_broadcast

FAULTY = {
    "rank-skipped-collective": partial(stored_log, "absent-rank-is-named-when-the-others-timed-out"),
    "rank-exited": partial(stored_log, "rank-without-entry-in-the-table-had-left"),
    "collective-order-mismatch": partial(stored_log, "odd-operation-among-tracebacks-is-the-culprits"),
    "backend-stall": partial(stored_log, "ranks-alike-in-everything-accuse-nobody"),
    "root-mismatch": lambda: written_log(in_broadcast({3: "send", 1: "recv"}, {0: 20, 2: 20})),
    "p2p-deadlock-cycle": partial(stored_log, "two-that-both-receive-wait-in-a-circle"),
    "p2p-tag-mismatch": partial(stored_log, "send-and-receive-with-other-tags-do-not-meet"),
    "p2p-unmatched": partial(stored_log, "receiver-that-takes-no-part-is-the-culprit"),
}
SOUND = partial(stored_log, "messages-between-two-ranks-accuse-nobody")
