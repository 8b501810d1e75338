"""The Python hook's shorter way records what the kernels would, and leaves the dispatcher as it was."""

import sys
from pathlib import Path

import pytest

from dtprof.records import paths, schema
from dtprof.records.reader import open_run, read_rank
from tests import jobs

pytestmark = pytest.mark.jobs
REDUCTION = {name: code for code, name in enumerate(schema.REDUCE_OPS)}


def test_each_call_is_recorded_once_whatever_way_it_takes(tmp_path: Path) -> None:
    folder = tmp_path / paths.rank_folder_name(0, 0)
    folder.mkdir()
    environment = {"DTPROF_NATIVE_TAP": "", "PYTHONPATH": str(jobs.REPOSITORY)}
    command = [sys.executable, str(jobs.PROGRAMS / "shortcut.py"), str(folder)]
    job = jobs.finished(command, tmp_path, env=environment)
    # The log is closed by then: how torch ends its threads does not matter here.
    assert job.process.returncode == 0 or jobs.ABORTED_AT_EXIT in job.stderr, job.stderr

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
        ("all_gather", 3, schema.NO_CODE, False, False),
        ("reduce_scatter", 3, REDUCTION["avg"], False, False),
        ("gather", 3, schema.NO_CODE, False, False),
        ("all_gather", 3, schema.NO_CODE, False, True),
    ]
    assert tables.operations["seq"].tolist() == list(range(12))
    assert {tables.sites[int(row["site"])].function for row in tables.operations} >= {"main"}


def test_job_whose_collectives_torch_checks_runs_as_it_does_bare(tmp_path: Path) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: a wrapper around gloo makes tensors of its own in every collective."""
    command = jobs.forked(2, jobs.PROGRAMS / "checked.py")
    jobs.recorded(tmp_path / "run", command, "--no-native", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for tables in open_run(tmp_path / "run").load_all():
        assert (tables.hook, tables.errors) == ("python", 0)
        # What the wrapper itself sends to compare the calls is not an operation of the job.
        assert [tables.ops[row["op"]] for row in tables.operations] == [
            "all_reduce",
            "broadcast",
            "all_gather",
            "barrier",
        ]
