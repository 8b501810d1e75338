"""Samples of the node: beside the job, about once a second, whatever becomes of the run directory."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtprof.launch import gpu_sampler, node_sampler
from dtprof.records import paths
from dtprof.records.nodes.node_reader import rate, read_node_samples


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of a node without GPUs that is sampled every 20 ms."""
    monkeypatch.setattr(node_sampler, "PERIOD_S", 0.02)
    monkeypatch.setattr(gpu_sampler, "open_gpus", lambda _: (None, "no driver"))
    (tmp_path / "node-here").mkdir()
    return tmp_path / "node-here"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def num_lines(node: Path) -> int:
    file = node / paths.SAMPLES
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def test_host_cores_and_ranks_are_sampled_until_the_job_ends(node: Path) -> None:
    running = node_sampler.Sampler(node, lambda: [os.getpid(), 2**22 + 1])  # the other one has ended
    wait_until(lambda: num_lines(node) > 3)
    begin_s, used_s = time.monotonic(), time.process_time()
    while time.process_time() < used_s + 0.5:
        pass
    took_s = time.monotonic() - begin_s
    seen = num_lines(node)
    wait_until(lambda: num_lines(node) > seen)  # the sample before may be half a second old
    running.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "dtprof-sampler"]
    samples = read_node_samples(node.parent)["here"]
    assert samples.no_gpus_reason == "no driver"
    assert (len(samples.cores), list(samples.processes), samples.gpus) == (os.cpu_count(), [os.getpid()], {})
    assert (np.diff(samples.host["t_ns"]) > 0).all()
    rank = samples.processes[os.getpid()]
    assert abs(rank["rss_bytes"][-1] - 1024 * int(status("VmRSS"))) < 64 << 20
    # Half a second of processor time was used while sampled; the kernel counts in ticks of 10 ms.
    used = rank["user_s"][-1] + rank["system_s"][-1] - rank["user_s"][0] - rank["system_s"][0]
    assert 0.4 < used < 0.5 + 2.0
    busy = samples.host["cpu_busy_s"][-1] - samples.host["cpu_busy_s"][0]
    cores = sum(core["busy_s"][-1] - core["busy_s"][0] for core in samples.cores)
    assert busy >= 0.4
    assert busy == pytest.approx(cores, abs=1e-3)
    assert samples.host["memory_used_bytes"][0] > 0
    assert (rate(samples.host, "loopback_bytes")[np.diff(samples.host["t_ns"]) > 0] >= 0).all()
    assert took_s > 0


def status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def test_run_that_was_deleted_ends_the_samples_and_nothing_else(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = node_sampler.Sampler(node, list)
    wait_until(lambda: num_lines(node) > 1)
    shutil.rmtree(node)
    wait_until(lambda: not running._thread.is_alive())
    running.stop()
    assert capsys.readouterr().err == ""


def test_driver_that_does_not_answer_does_not_hold_up_the_end(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(_: int) -> tuple[None, str]:
        release.wait(60)
        return None, "too late"

    monkeypatch.setattr(gpu_sampler, "open_gpus", hang)
    monkeypatch.setattr(node_sampler, "STOP_S", 0.05)
    running = node_sampler.Sampler(node, list)
    running.stop()
    assert running._thread.is_alive()
    release.set()
    running._thread.join(60)


def test_error_of_our_own_is_reported_once(
    node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_cgroup: object, *, busy_s: float) -> list[float]:
        raise KeyError("lo" if busy_s else "none")

    monkeypatch.setattr(node_sampler, "_host_values", fail)
    running = node_sampler.Sampler(node, list)
    running._thread.join(60)
    assert capsys.readouterr().err == "dtprof: the node is no longer sampled: KeyError: 'lo'\n"
