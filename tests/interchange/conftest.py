"""A run of tensor, data and pipeline parallelism whose figures every format must give back."""

from pathlib import Path

import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.timeline.operation_detail import RunDetail, read_detail
from dtprof.records.reader import Run, open_run
from tests.synthetic import Job, generate


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("export") / "run"
    generate(folder, Job(tp=2, dp=2, pp=2, microbatches=3, steps=6, jitter=0.1, slow={3: 1.4}))
    return open_run(folder)


@pytest.fixture(scope="session")
def summary(run: Run) -> Summary:
    return summarise(run)


@pytest.fixture(scope="session")
def detail(run: Run) -> RunDetail:
    return read_detail(run)


@pytest.fixture(scope="session")
def used(summary: Summary) -> range:
    """The numbers of the steps that figures are taken from."""
    assert summary.steps.used is not None
    first, last = summary.steps.used
    assert last - first >= 3
    return range(first, last + 1)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
