"""Operations carry the attribution label of their thread."""

import os
import sys
from pathlib import Path

import pytest

from dtprof.launch import interpreter
from dtprof.records import paths
from dtprof.records.reader import read_rank
from tests import jobs

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_labels_nest_and_belong_to_their_thread(tmp_path: Path, native: bool) -> None:
    hook = interpreter.choose_hook(sys.executable, native=native, environment=dict(os.environ), say=print)
    folder = tmp_path / paths.rank_folder_name(0, 0)
    folder.mkdir()
    environment = {"DTPROF_NATIVE_TAP": hook.library or "", "PYTHONPATH": str(jobs.REPOSITORY)}
    command = [sys.executable, str(jobs.PROGRAMS / "labelled.py"), str(folder)]
    job = jobs.finished(command, tmp_path, env=environment)
    assert job.process.returncode == 0, job.stderr

    tables = read_rank(folder, rank=0, attempt=0)
    assert tables.problems == ()
    sites = [tables.sites[int(row["site"])] for row in tables.operations]
    assert [site.label and site.label.module for site in sites] == ["layers.0", "layers.1", None, None]
    assert {Path(site.file).name for site in sites} == {"labelled.py"}
    assert sites[0].line == sites[1].line
    assert [(row["stage"], row["microbatch"]) for row in tables.spans] == [(3, 5)]
