"""A store or a rendezvous waited in vain: ranks did not join."""

from functools import partial

from tests.diagnosis.judging import stored_log

NO_COMMUNICATOR = "rank-of-a-group-that-gave-no-communicator-is-named-where-it-is-the-global-one"
FAULTY = {
    "rank-never-joined": partial(stored_log, "store-key-names-the-rank-that-never-joined"),
    "group-creation-mismatch": partial(stored_log, "barrier-of-a-later-group-is-about-that-group"),
    "rank-skipped-collective": partial(
        stored_log, "rank-of-a-group-that-gave-no-communicator-is-named-where-it-is-the-global-one"
    ),
}
SOUND = partial(stored_log, "healthy-log-has-no-finding")
