"""A log keeps its first and its newest segments and counts exactly what lay between."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from dtprof.launch import interpreter
from dtprof.run_format import paths, schema
from dtprof.run_format.reader import read_rank
from tests import jobs

pytestmark = pytest.mark.jobs

COUNT = 6 * schema.SEGMENT_CAPACITY + 1000


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_the_first_and_the_newest_events_are_kept_and_the_rest_is_counted(tmp_path: Path, native: bool) -> None:
    tap = interpreter.choose_tap(sys.executable, native=native, environment=dict(os.environ), say=print)
    assert (tap.library is not None) == native
    folder = tmp_path / paths.rank_folder_name(0, 0)
    folder.mkdir()
    command = [sys.executable, str(jobs.PROGRAMS / "many_samples.py"), str(folder), str(COUNT)]
    limit = {"DTPROF_MAX_LOG_MB": "16", "DTPROF_NATIVE_TAP": tap.library or "", "PYTHONPATH": str(jobs.REPOSITORY)}
    job = jobs.finished(command, tmp_path, env=limit)
    assert job.process.returncode == 0, job.stderr

    tables = read_rank(folder, rank=0, attempt=0)
    values = tables.samples["value"]
    assert tables.problems == ()
    assert len(values) + tables.dropped_events == COUNT
    assert sum(file.stat().st_size for file in folder.glob("events.*")) <= 16 * 1024 * 1024
    assert values[: schema.SEGMENT_CAPACITY].tolist() == list(range(schema.SEGMENT_CAPACITY))
    newest = values[schema.SEGMENT_CAPACITY :]
    assert newest[-1] == COUNT - 1
    assert (np.diff(newest) == 1).all()
    assert len(newest) >= schema.SEGMENT_CAPACITY
    assert not tables.truncated
    assert tables.closed
