"""Durations are taken from the back end's ring once each; the ring here is made up, for want of a GPU."""

import os
import pickle
import time
from typing import Any

import pytest
import torch

from dtprof.capture.nccl_durations import NcclDurations, reader


class Recorded:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []

    def device_time(self, group: int, taken_ns: int, duration_ns: int, seen_ns: int) -> None:
        self.rows.append((group, duration_ns, seen_ns - taken_ns))


def entry(record_id: int, *, state: str = "completed", group: str = "0", ms: float | None = 2.5) -> dict[str, Any]:
    """Return an entry as torch 2.13's NCCL back end writes it; those of gloo have no duration."""
    created = time.time_ns()
    return {
        "record_id": record_id,
        "state": state,
        "process_group": (group, "default_pg"),
        "duration_ms": ms,
        "time_created_ns": created,
        "time_discovered_completed_ns": created + 90_000_000 if state == "completed" else None,
    }


def test_each_completed_operation_is_recorded_once() -> None:
    ring = [entry(0), entry(1, state="scheduled", ms=None), entry(2, group="7", ms=1.0), entry(3, group="unknown")]
    recorded = Recorded()
    times = NcclDurations(recorded, {"0": 4, "7": 5}, lambda: pickle.dumps({"entries": ring}))  # type: ignore[arg-type]
    assert times.drain() is not None
    assert recorded.rows == [(4, 2_500_000, 90_000_000), (5, 1_000_000, 90_000_000)]
    ring[1] = entry(1, ms=0.25)
    times.drain()
    times.drain()
    assert recorded.rows[2:] == [(4, 250_000, 90_000_000)]


def test_a_ring_that_cannot_be_read_ends_the_reading_and_harms_nobody(capsys: Any) -> None:
    times = NcclDurations(Recorded(), {}, lambda: b"no pickle")  # type: ignore[arg-type]
    assert times.drain() is None
    assert "durations on the device is not recorded" in capsys.readouterr().err


def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    times = NcclDurations(Recorded(), {}, lambda: pickle.dumps({"entries": []}))  # type: ignore[arg-type]
    times._lock.acquire()  # as a thread held it that was not forked
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert times.drain() is None


def test_the_ring_of_gloo_is_not_taken_for_that_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d: Any = torch._C._distributed_c10d
    monkeypatch.delattr(c10d, "_dump_nccl_trace", raising=False)
    assert reader() is None  # though _dump_fr_trace is there, and dumps gloo's
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda **_: b"of NCCL", raising=False)
    read = reader()
    assert read is not None
    assert read() == b"of NCCL"
