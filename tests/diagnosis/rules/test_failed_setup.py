"""A rank could not listen at its port, or not use its device."""

from functools import partial

from tests.diagnosis.judging import logged, stored_log

PORT_TAKEN = "[rank0]: DistNetworkError: The server socket has failed to listen on any, name: EADDRINUSE"
FAULTY = {
    "rank-crashed": partial(logged, PORT_TAKEN),
}
SOUND = partial(stored_log, "timeout-of-a-users-own-connection-is-the-ranks-own")
