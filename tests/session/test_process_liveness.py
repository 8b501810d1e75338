"""Which ranks are said to run: those whose process is there."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.analysis.run_summary import summarise
from dtprof.records import paths, writer
from dtprof.records.reader import open_run
from dtprof.session.engines import IN_THIS_PROCESS
from dtprof.session.process_liveness import confirm_running, is_alive
from dtprof.session.run_exports import export_run
from dtprof.session.run_measurement import summarise_opened
from tests.builders import RankBuilder, write_run

RUNNING, NO_EXIT_RECORD = RankEnd(EndState.RUNNING), RankEnd(EndState.NO_RECORD)
DEAD_PID = 2**22 + 1
"""More than Linux gives."""


def unended_run(folder: Path, boot_id: str) -> Path:
    """Write the run of two ranks that left no exit record, of a job whose end nobody saw."""
    ranks = [RankBuilder(rank, world_size=2, closed=False) for rank in range(2)]
    for rank in ranks:
        rank.boot_id, rank.pid, rank.host = boot_id, DEAD_PID + rank.rank, f"host{rank.rank}"
        rank.op("all_reduce", 10, 20)
    run = write_run(folder, ranks)
    manifest = run / paths.MANIFEST
    document = json.loads(manifest.read_text()) | {"ended_realtime_ns": 0, "exit_status": None}
    manifest.write_text(json.dumps(document))
    return run


def test_a_rank_of_this_host_that_is_gone_exited_without_an_exit_record(tmp_path: Path) -> None:
    run = open_run(unended_run(tmp_path / "run", writer.boot_id()))
    assert {rank.ended for rank in summarise(run).ranks} == {RUNNING}
    assert {rank.ended for rank in confirm_running(summarise(run), run).ranks} == {NO_EXIT_RECORD}


def test_exported_tables_and_the_api_say_the_same_of_a_rank_that_is_gone(tmp_path: Path) -> None:
    path = unended_run(tmp_path / "run", writer.boot_id())
    export_run(path, "csv", tmp_path / "tables", IN_THIS_PROCESS)
    with (tmp_path / "tables" / "ranks.csv").open(encoding="utf-8") as file:
        assert {row["ended"] for row in csv.DictReader(file)} == {str(NO_EXIT_RECORD)}
    assert {rank.ended for rank in summarise_opened(open_run(path), IN_THIS_PROCESS).ranks} == {NO_EXIT_RECORD}


def test_a_rank_of_another_host_may_still_run(tmp_path: Path) -> None:
    run = open_run(unended_run(tmp_path / "run", "another-boot"))
    assert {rank.ended for rank in confirm_running(summarise(run), run).ranks} == {RUNNING}


def test_ranks_of_a_host_that_is_silent_may_have_ended(tmp_path: Path) -> None:
    run = open_run(unended_run(tmp_path / "run", "another-boot"))
    for rank, heard_s in enumerate((1000, 940)):
        file = run.path / paths.node_folder_name(f"host{rank}") / paths.SAMPLES
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (heard_s, heard_s))
    (told,) = [reason for reason in confirm_running(summarise(run), run).cannot_tell if reason.startswith("ended")]
    assert told == "ended: rank 1 may have ended: nothing was heard of host host1 for 60 s while others were"
    os.utime(file, (999, 999))
    assert not [reason for reason in confirm_running(summarise(run), run).cannot_tell if reason.startswith("ended")]


MAPS = """
import mmap, sys
file = open(sys.argv[1], "rb")
kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_joined_the_run_after_its_start_is_known_by_the_log_that_it_maps(tmp_path: Path) -> None:
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("run")
    log = tmp_path / "run" / "events"
    log.write_bytes(b"events")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MAPS, log], env={}, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = {
            name: is_alive(process.pid, tmp_path / name) for name in ("run", "link", "../" + tmp_path.name + "/run")
        }
        assert set(found.values()) == {True}, found
        assert not is_alive(process.pid, tmp_path / "run-2")
    assert not is_alive(process.pid, tmp_path / "run")
