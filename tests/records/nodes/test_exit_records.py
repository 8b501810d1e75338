"""How processes ended and where they stood: told apart by host, pid and attempt."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.cli.main import main
from dtprof.records import paths
from dtprof.records.nodes.exit_records import ExitRecords, is_stop
from dtprof.records.reader import open_run
from dtprof.records.tables import ProcessExit
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import START_NS, RankBuilder, write_run


def two_containers(folder: Path) -> Path:
    """Write a run of two hosts whose ranks both have pid 1: that of host b was killed, that of host a waits for it."""
    ranks = [RankBuilder(i, world_size=2, host=f"host-{'ab'[i]}", boot_id=f"boot-{'ab'[i]}") for i in range(2)]
    for rank in ranks:
        rank.pid = 1
        rank.op("all_reduce", 100, 200, nbytes=64)
    ranks[0].op("all_reduce", 300, None)
    ranks[0].closed = ranks[1].closed = False
    write_run(folder, ranks, exit_status=1)
    for name, status in (("a", -15), ("b", -9)):
        node = folder / paths.node_folder_name(f"host-{name}")
        (node / paths.EXITS).write_text(
            json.dumps({"pid": 1, "status": status, "t_ns": START_NS + 400 + status}) + "\n"
        )
        frames = [{"name": f"in_{name}", "filename": "/home/me/train.py", "line": 7}]
        facts = {"state": "sleeping", "threads": [{"thread_name": "MainThread", "frames": frames}]}
        (node / paths.STACKS).write_text(json.dumps({"t_ns": START_NS, "processes": {"1": facts}}))
    return folder


def test_equal_pids_of_two_hosts_are_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = two_containers(tmp_path / "run")
    assert [rank.ended for rank in summarise(open_run(run)).ranks] == ["killed by SIGTERM", "killed by SIGKILL"]
    finding = diagnose_run(run).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (1,))
    assert main(["stacks", str(run), "--kept", "--json"]) == 0
    stacks = json.loads(capsys.readouterr().out)
    assert [(group["ranks"], group["frames"][0]["function"]) for group in stacks["groups"]] == [
        ([0], "in_a"),
        ([1], "in_b"),
    ]


def test_of_attempts_with_equal_pids_each_has_its_own_end() -> None:
    rows = (ProcessExit(pid=1, status=1, t_ns=100), ProcessExit(pid=1, status=0, t_ns=200))
    exit_records = ExitRecords(exits={"node-a": {1: rows}})
    assert exit_records.exit_of("a", 1, since_ns=10) == rows[0]
    assert exit_records.exit_of("a", 1, since_ns=150) == rows[1]
    assert exit_records.exit_of("a", 1, since_ns=250) is None  # it runs on
    assert exit_records.exit_of("a", 1) == rows[1]


def test_a_host_without_a_folder_has_the_only_process_of_that_pid() -> None:
    row = ProcessExit(pid=1, status=0, t_ns=100)
    assert ExitRecords(exits={"node-a": {1: (row,)}, "node-b": {}}).exit_of("renamed", 1) == row
    assert ExitRecords(exits={"node-a": {1: (row,)}, "node-b": {1: (row,)}}).exit_of("renamed", 1) is None
    assert ExitRecords(exits={"node-a": {}, "node-b": {1: (row,)}}).exit_of("a", 1) is None


def test_a_stop_is_one_of_three_signals_as_python_or_as_a_shell_states_it() -> None:
    assert [status for status in (None, *range(-20, 256)) if is_stop(status)] == [-15, -2, -1, 129, 130, 143]
