"""Fingerprints and checks of backends name operations that do not agree."""

from functools import partial

from tests.diagnosis.judging import logged, stored_log

OTHER_STEP = "AssertionError: Rank 1 has different values for step: 8016.0. Other ranks: 7870.0"
FAULTY = {
    "collective-order-mismatch": partial(stored_log, "odd-rank-of-three-is-the-culprit-3"),
    "dtype-mismatch": partial(stored_log, "odd-rank-of-three-is-the-culprit"),
    "size-mismatch": partial(stored_log, "models-that-differ-under-ddp"),
    "step-mismatch": partial(logged, OTHER_STEP),
    "split-size-mismatch": partial(stored_log, "gloo-that-received-too-much-names-the-rank-that-lived"),
}
SOUND = partial(stored_log, "a-peer-that-died-is-no-other-model")
