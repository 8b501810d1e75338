"""Sentences tell of ends that no exit of a named rank stands for."""

from functools import partial

from tests.diagnosis.judging import logged, stored_log

DEVICE_ERROR = (
    "[rank1]:[E1121 10:00:01.000000002 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group "
    "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
)
FAULTY = {
    "rank-crashed": partial(logged, DEVICE_ERROR),
    "rank-killed": partial(stored_log, "killed-rank-is-named-and-memory-where-the-log-tells"),
}
SOUND = partial(stored_log, "stop-from-outside-is-no-fault")
