"""Launchers in a rendezvous: how they are found, and what they were told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtprof import settings
from dtprof.launch import rendezvous_waits, stack_sampler
from dtprof.launch.rendezvous_waits import RendezvousWatch, find_place, find_waits
from dtprof.launch.run_processes import ProcessSearch
from dtprof.records import paths
from tests.jobs import started

ELASTIC = "/venv/lib/torch/distributed/elastic/"


def stack(*frames: tuple[str, str]) -> list[dict[str, object]]:
    """Return the threads of a process with these frames, innermost first: file of the elastic launcher, function."""
    return [
        {
            "thread_name": "MainThread",
            "frames": [
                *({"filename": ELASTIC + file, "name": name} for file, name in frames),
                {"filename": "/venv/bin/torchrun", "name": "<module>"},
            ],
        }
    ]


def test_place_of_a_launcher_tells_what_it_waits_for() -> None:
    meets = stack(
        ("rendezvous/utils.py", "_delay"),
        ("rendezvous/dynamic_rendezvous.py", "DynamicRendezvousHandler.next_rendezvous"),
        ("agent/server/api.py", "SimpleElasticAgent._rendezvous"),
    )
    reaches = stack(
        ("rendezvous/c10d_rendezvous_backend.py", "_create_tcp_store"),
        ("rendezvous/registry.py", "get_rendezvous_handler"),
    )
    numbered = stack(("rendezvous/static_tcp_rendezvous.py", "next_rendezvous"), ("agent/server/api.py", "_rendezvous"))
    runs = stack(("agent/server/api.py", "SimpleElasticAgent._invoke_run"))
    found = [find_place(threads) for threads in (meets, reaches, numbered, runs, None)]
    assert found == ["next_rendezvous", "_create_tcp_store", rendezvous_waits.STATIC, None, None]
    own = [{"frames": [{"filename": "/home/me/download.py", "name": "next_rendezvous"}]}]
    assert find_place(own) is None


def test_only_launchers_of_the_run_without_ranks_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "import sys; print(flush=True); sys.stdin.read()"
    launcher = tmp_path / "torchrun"
    launcher.write_text(waits)
    started_now = []

    def start(run: Path, *command: str, **environment: str) -> int:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {settings.ENV_RUN_DIR: str(run)} | environment,
        )
        started_now.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    looked_at: list[int] = []

    def describe(pid: int) -> dict[str, object]:
        looked_at.append(pid)
        return {"threads": stack(("agent/server/api.py", "_rendezvous"))}

    monkeypatch.setattr(stack_sampler, "describe_process", describe)
    try:
        own = start(tmp_path, str(launcher), "--nnodes", "2")
        start(tmp_path, str(launcher), LOCAL_RANK="0")  # a rank
        start(tmp_path, "-c", waits)  # not a launcher
        start(tmp_path / "other", str(launcher))
        found = find_waits(ProcessSearch(tmp_path))
        assert (looked_at, list(found), found[own]["nodes"]) == ([own], [own], 2)
        assert rendezvous_waits.has_ranks(tmp_path)
        assert not rendezvous_waits.has_ranks(tmp_path / "other")
    finally:
        for process in started_now:
            process.kill()
            process.communicate()


def test_time_in_a_rendezvous_counts_from_its_own_first_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, dict[str, object]] = {}
    monkeypatch.setattr(rendezvous_waits, "find_waits", lambda _: dict(seen))
    monkeypatch.setattr(rendezvous_waits, "has_ranks", lambda _: False)
    monkeypatch.setattr(stack_sampler, "sample", lambda pids, _: {"t_ns": 1, "processes": {str(p): {} for p in pids}})
    watch = RendezvousWatch(tmp_path, tmp_path)
    assert watch.poll(100.0) == 0.0  # a launcher that fetches data first
    seen[7] = {"nodes": 2}
    assert [watch.poll(200.0), watch.poll(212.0)] == [0.0, 12.0]
    watch.write()
    document = json.loads((tmp_path / paths.STACKS).read_text())
    assert document["processes"]["7"]["rendezvous"] == {"nodes": 2, "waited_s": 12.0}
    seen.clear()  # it gives up: what it had waited for is still the cause
    assert watch.poll(220.0) == 0.0
    assert (tmp_path / paths.STACKS).exists()
    monkeypatch.setattr(rendezvous_waits, "has_ranks", lambda _: True)
    watch.poll(225.0)
    assert not (tmp_path / paths.STACKS).exists()


def test_rendezvous_that_nobody_else_comes_to_is_named_and_stopped(tmp_path: Path) -> None:
    run, program = tmp_path / "run", tmp_path / "train.py"
    program.write_text("")
    options = ["-o", str(run), "--hang-after", "1", "--on-hang", "stop"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "lonely"]
    command = [sys.executable, "-m", "dtprof", "run", *options, "--", *launcher, *rendezvous, str(program)]
    with started(command, tmp_path) as job:
        assert job.wait() == 3
    assert "kind: rank-never-joined" in job.stderr
    assert "(id lonely) for 1 of 2 nodes" in " ".join(job.stderr.replace("dtprof:", "").split())
