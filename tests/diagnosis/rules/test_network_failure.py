"""A transport failed: no rank is to blame."""

from functools import partial

from tests.diagnosis.judging import stored_log

FAULTY = {
    "backend-stall": partial(stored_log, "failed-transport-is-no-ranks-fault"),
}
SOUND = partial(stored_log, "one-waiting-rank-accuses-nobody")
