"""Counts of how far each rank had come when its watchdog asked for dumps."""

from functools import partial

from tests.diagnosis.judging import stored_log

FAULTY = {
    "rank-skipped-collective": partial(stored_log, "the-rank-whose-count-stands-below-is-named"),
    "backend-stall": partial(stored_log, "when-all-began-it-nobody-is-accused"),
}
SOUND = partial(stored_log, "counts-that-do-not-decide-are-a-hang-that-cannot-be-told")
