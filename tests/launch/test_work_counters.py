"""Work of a process is what its program does: threads that poll without end do not count."""

import os
import threading
import time
from pathlib import Path

import pytest

from dtprof.launch.work_counters import read_work_counters

WORK_S = 0.3


def _burnt_s(name: str) -> float:
    """Return by how much the CPU time of this process grows while a thread of this name works."""
    done = threading.Event()
    read = threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        while time.thread_time() < WORK_S:
            pass
        done.set()
        read.wait()

    thread = threading.Thread(target=run, daemon=True)
    before = read_work_counters(os.getpid()).cpu_s
    thread.start()
    done.wait()
    after = read_work_counters(os.getpid()).cpu_s
    read.set()
    thread.join()
    assert before is not None
    assert after is not None
    return after - before


@pytest.mark.parametrize("name", ["TP_SHM_reactor", "NCCL Progress 0"])
def test_a_thread_that_polls_is_no_work(name: str) -> None:
    assert _burnt_s(name) < WORK_S / 2


def test_any_other_thread_is_work() -> None:
    assert _burnt_s("tokenizer") >= WORK_S * 0.9
