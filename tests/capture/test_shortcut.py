"""The Python tap's shorter way records what the kernels would, and leaves the dispatcher as it was."""

import sys
from pathlib import Path

import pytest

from dtprof.run_format import paths, schema
from dtprof.run_format.reader import read_rank
from tests import jobs

pytestmark = pytest.mark.jobs
REDUCTION = {name: code for code, name in enumerate(schema.REDUCE_OPS)}


def test_each_call_is_recorded_once_whatever_way_it_takes(tmp_path: Path) -> None:
    folder = tmp_path / paths.rank_folder_name(0, 0)
    folder.mkdir()
    environment = {"DTPROF_NATIVE_TAP": "", "PYTHONPATH": str(jobs.REPOSITORY)}
    command = [sys.executable, str(jobs.PROGRAMS / "shortcut.py"), str(folder)]
    job = jobs.finished(command, tmp_path, env=environment)
    assert job.process.returncode == 0, job.stderr

    tables = read_rank(folder, rank=0, attempt=0)
    assert tables.problems == ()
    described = [
        (
            tables.ops[row["op"]],
            int(row["numel"]),
            int(row["reduce_op"]),
            bool(row["flags"] & schema.FLAG["async"]),
            bool(row["state"] == schema.STATE["failed"]),
        )
        for row in tables.operations
    ]
    # What a dispatch mode keeps from happening is not an operation.
    assert described == [
        ("all_reduce", 3, REDUCTION["sum"], False, False),
        ("all_reduce", 3, REDUCTION["max"], True, False),
        ("broadcast", 3, schema.NO_CODE, True, True),
        ("broadcast", 5, schema.NO_CODE, False, False),
        ("all_reduce", 7, REDUCTION["sum"], False, False),
        ("all_reduce", 4, REDUCTION["sum"], False, False),
        ("all_reduce", 3, REDUCTION["sum"], True, False),
        ("all_reduce", 3, REDUCTION["sum"], True, False),
    ]
    assert tables.operations["seq"].tolist() == list(range(8))
    assert {tables.sites[int(row["site"])].function for row in tables.operations} >= {"main"}
