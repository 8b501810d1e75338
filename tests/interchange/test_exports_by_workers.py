"""Exports that worker processes do most of are those of one process."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.records.reader import Run
from dtprof.session.executors.local_processes import LocalProcesses
from dtprof.session.run_exports import write_export


def content_of(path: Path) -> Any:
    """Return what a file holds, without the times at which it was written."""
    if path.suffix == ".gz" or path.name == "chrome":
        return gzip.decompress(path.read_bytes())
    if not path.name.startswith("events.out.tfevents."):
        return path.read_bytes()
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = list(LegacyEventFileLoader(str(path)).Load())
    scalars = [(event.step, value) for event in events for value in event.summary.value if value.tag[0] != "_"]
    return sorted((step, value.SerializeToString(deterministic=True)) for step, value in scalars)


def write_all(run: Run, folder: Path, executor: Executor) -> dict[str, Any]:
    folder.mkdir()
    for kind in ("perfetto", "chrome", "kineto", "tensorboard", "csv"):
        write_export(run, kind, folder / kind, None, executor=executor)
    files = [path for path in folder.rglob("*") if path.is_file()]
    named = [(str(path.relative_to(folder)).split(".out.tfevents.")[0], path) for path in sorted(files)]
    return {name: content_of(path) for name, path in named}


@pytest.mark.filterwarnings("ignore")
def test_workers_write_what_one_process_writes(run: Run, tmp_path: Path) -> None:
    expected = write_all(run, tmp_path / "here", THIS_PROCESS)
    assert len(expected) > 30
    with LocalProcesses(2) as processes:
        assert write_all(run, tmp_path / "there", processes) == expected
