"""A log keeps its first and its newest segments and counts exactly what lay between."""

import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from dtprof.launch import interpreter
from dtprof.launch.archiver import sealed_segments
from dtprof.records import paths, schema
from dtprof.records.rank_log import archive
from dtprof.records.reader import read_rank
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs

COUNT = 6 * schema.SEGMENT_CAPACITY + 1000
LIMIT_MB = 16


def start(tmp_path: Path, *, native: bool, count: int, hold_at: int = -1) -> tuple[Path, list[str], dict[str, str]]:
    """Return the folder of the rank, and command and environment of a process that writes `count` samples into it."""
    hook = interpreter.choose_hook(sys.executable, native=native, environment=dict(os.environ), say=print)
    assert (hook.library is not None) == native
    folder = tmp_path / paths.rank_folder_name(0, 0)
    folder.mkdir()
    command = [sys.executable, str(jobs.PROGRAMS / "many_samples.py"), str(folder), str(count), str(hold_at)]
    environment = {
        "DTPROF_MAX_LOG_MB": str(LIMIT_MB),
        "DTPROF_NATIVE_TAP": hook.library or "",
        "PYTHONPATH": str(jobs.REPOSITORY),
    }
    return folder, command, environment


def check(folder: Path, count: int) -> RankTables:
    """Check that every event is kept or counted, and the limit is kept."""
    tables = read_rank(folder, rank=0, attempt=0)
    values = tables.samples["value"]
    assert tables.problems == ()
    assert len(values) + tables.dropped_events == count
    assert sum(file.stat().st_size for file in folder.glob("events.*")) <= LIMIT_MB * 1024 * 1024
    assert values[: schema.SEGMENT_CAPACITY].tolist() == list(range(schema.SEGMENT_CAPACITY))
    assert values[-1] == count - 1
    gaps = np.flatnonzero(np.diff(values) != 1)
    assert len(gaps) <= 1
    dropped = tables.dropped
    assert dropped["events"].sum() == tables.dropped_events
    if len(gaps):
        assert dropped["kind"].tolist() == [schema.KIND["sample"]]
        assert dropped["numel"].tolist() == [values[gaps[0] + 1] - 1]  # of samples, the largest value
    assert not tables.truncated
    assert tables.closed
    return tables


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_the_first_and_the_newest_events_are_kept_and_the_rest_is_counted(tmp_path: Path, native: bool) -> None:
    folder, command, environment = start(tmp_path, native=native, count=COUNT)
    job = jobs.finished(command, tmp_path, env=environment)
    assert job.process.returncode == 0, job.stderr
    tables = check(folder, COUNT)
    assert len(tables.samples) >= 2 * schema.SEGMENT_CAPACITY
    assert tables.dropped_events > 0


def resident_bytes(process: int, file: str) -> int:
    """Return how much of a mapped file is in the memory of a process."""
    maps = psutil.Process(process).memory_maps()
    return sum(part.rss for part in maps if Path(part.path).name == file)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_archived_segments_take_little_room_and_are_read_like_the_others(tmp_path: Path, native: bool) -> None:
    hold_at = 3 * schema.SEGMENT_CAPACITY + 100
    folder, command, environment = start(tmp_path, native=native, count=COUNT, hold_at=hold_at)
    with jobs.started(command, tmp_path, env=environment) as job:
        job.wait_until(lambda: "holding" in job.stdout and len(sealed_segments(tmp_path)) >= 1)
        if native:  # what is full is on the disk, not in the memory of the job
            job.wait_until(lambda: resident_bytes(job.process.pid, "events.00000") < schema.SEGMENT_SIZE // 16)
            assert resident_bytes(job.process.pid, "events.00003") > 0
        for segment in sealed_segments(tmp_path):
            archive.archive_segment(segment)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.stderr
    assert list(folder.glob("events.*.z"))
    check(folder, COUNT)


@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["native", "python"])
def test_nothing_is_lost_or_counted_twice_while_segments_are_archived(tmp_path: Path, native: bool) -> None:
    folder, command, environment = start(tmp_path, native=native, count=4 * COUNT)
    with jobs.started(command, tmp_path, env=environment) as job:
        while job.process.poll() is None:
            for segment in sealed_segments(tmp_path):
                archive.archive_segment(segment)
        assert job.wait() == 0, job.stderr
    check(folder, 4 * COUNT)
