"""A call site names the lines of the user's code that led there."""

import os
import sys
from pathlib import Path

import pytest

from dtprof.launch import interpreter
from dtprof.records import paths, schema
from dtprof.records.reader import read_rank
from tests import jobs

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_calls_of_one_line_are_told_apart_by_their_callers(tmp_path: Path, native: bool) -> None:
    hook = interpreter.choose_hook(sys.executable, native=native, environment=dict(os.environ), say=print)
    folder = tmp_path / paths.rank_folder_name(0, 0)
    folder.mkdir()
    environment = {"DTPROF_NATIVE_TAP": hook.library or "", "PYTHONPATH": str(jobs.REPOSITORY)}
    command = [sys.executable, str(jobs.PROGRAMS / "called_from.py"), str(folder)]
    job = jobs.finished(command, tmp_path, env=environment)
    assert job.process.returncode == 0, job.stderr

    tables = read_rank(folder, rank=0, attempt=0)
    assert tables.problems == ()
    numbers = tables.operations["site"].tolist()
    assert numbers[:2] == numbers[2:4]
    train, evaluate, *_, deep = (tables.sites[number] for number in numbers)
    assert train == evaluate == deep
    assert (train.function, train.api) == ("average", "all_reduce")
    assert [caller.function for caller in train.callers] == ["train", "main", "<module>"]
    in_lambda, within, *others = (caller.function.rpartition(".")[2] for caller in evaluate.callers)
    assert (in_lambda, within, others) == ("<lambda>", "evaluate", ["main", "<module>"])
    assert train.callers[1].line == evaluate.callers[2].line - 1
    assert [caller.function for caller in deep.callers] == ["descend"] * schema.MOST_CALLERS
