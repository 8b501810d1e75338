"""NCCL's watchdog stalled itself."""

from functools import partial

from tests.diagnosis.judging import stored_log

FAULTY = {
    "rank-stuck": partial(stored_log, "stuck-watchdog-is-the-ranks-own-and-less-sure"),
}
SOUND = partial(stored_log, "time-far-above-the-limit-is-a-host-that-stood-still")
