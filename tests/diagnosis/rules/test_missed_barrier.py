"""A monitored barrier names the ranks that did not come."""

from functools import partial

from tests.diagnosis import log_texts as texts
from tests.diagnosis.judging import logged, stored_log

MISSED_BY_ONE_THAT_LEFT = "\n".join(
    [
        "[rank0]:[E1121 10:00:00.1 ProcessGroupGloo.cpp:67] [Rank 0]: Ranks 1 failed to pass monitoredBarrier",
        texts.table({0: 1, 2: 1}, first=0),
    ]
)
FAULTY = {
    "rank-skipped-collective": partial(stored_log, "monitored-barrier-names-who-did-not-come"),
    "rank-exited": partial(logged, MISSED_BY_ONE_THAT_LEFT),
}
SOUND = partial(stored_log, "barriers-that-point-at-each-other-accuse-nobody")
