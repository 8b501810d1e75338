"""Exports of runs with long logs, of which only the steps shown are read, or ranges of steps one after the other."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from dtprof.analysis.map_reduce import long_log_survey
from dtprof.analysis.timeline.operation_detail import read_detail, read_to_sum
from dtprof.errors import NothingToShowError
from dtprof.interchange.exporters import kineto_export
from dtprof.interchange.exporters.tensorboard_logs import read_shown, read_shown_by_ranges
from dtprof.interchange.public_tables.record_tables import RECORDS
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import Run, open_run
from dtprof.session.run_exports import write_export
from tests import builders
from tests.golden.commands import unpack

STORED = ("ddp", "fsdp", "pipeline-tensor", "two-hosts", "python-hook", "restarted", "profiler-window", "nccl-ddp")
NEVER = 1 << 40


@pytest.fixture(params=STORED)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    unpack(f"runs/{request.param}", tmp_path)
    return open_run(next(tmp_path.rglob("run.json")).parent)


def write(run: Run, kind: str, folder: Path, steps: tuple[int, int] | None, *, long_from: int) -> list[str]:
    """Export a run, whose logs are long from so many records on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_log_survey, "LONG_LOG", long_from)
        patch.setattr(long_log_survey, "ROWS_AT_ONCE", 40)
        return write_export(run, kind, folder, steps, executor=THIS_PROCESS)


def slices(folder: Path) -> dict[str, list[str]]:
    """Return the slices of each rank, at times since 1970 in us, without what counts from the beginning of a file."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.pt.trace.json.gz")):
        document: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
        events = [event for event in document["traceEvents"] if event["ph"] == "X"]
        for event in events:
            event["ts"] = round(event["ts"] + document["baseTimeNanoseconds"] / 1000)
            del event["args"]["External id"]
        found[file.name] = sorted(json.dumps(event, sort_keys=True) for event in events)
    return found


def test_trace_of_a_long_run_shows_what_that_of_all_steps_shows(stored: Run, tmp_path: Path) -> None:
    steps = (3, 5)
    assert write(stored, "kineto", tmp_path / "whole", steps, long_from=NEVER) == []
    assert write(stored, "kineto", tmp_path / "some", steps, long_from=1) == []
    expected = slices(tmp_path / "whole")
    assert sum(map(len, expected.values())) > 40
    assert slices(tmp_path / "some") == expected


def test_only_the_steps_asked_for_are_read(stored: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_log_survey, "LONG_LOG", 1)
    detail, all_steps = read_detail(stored, steps=(4, 4), max_events=1000), read_detail(stored)
    assert detail.whole is not None
    assert 0 < sum(fact.events for fact in detail.surveys.facts) < all_steps.extent.events


def test_newest_steps_that_fit_are_named(stored: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_export, "MAX_EVENTS", 100)
    (said,) = write(stored, "kineto", tmp_path / "some", None, long_from=1)
    assert "a file of this format should hold 100 at most: steps " in said
    assert all(slices(tmp_path / "some").values())


def test_steps_that_a_long_run_lacks_are_refused(stored: Run, tmp_path: Path) -> None:
    with pytest.raises(NothingToShowError, match=r"none of the steps 900:901: its steps are \d+ to \d+; choose others"):
        write(stored, "kineto", tmp_path / "none", (900, 901), long_from=1)


def test_long_run_without_steps_is_shown_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [builders.RankBuilder(rank, 2) for rank in range(2)]
    for number in range(30):
        for rank in ranks:
            rank.op("all_reduce", 1000 * number, 1000 * number + 10, nbytes=8)
    run = open_run(builders.write_run(tmp_path / "run", ranks))
    monkeypatch.setattr(long_log_survey, "LONG_LOG", 1)
    assert read_detail(run, max_events=10).whole is None


@pytest.mark.parametrize("name", RECORDS)
def test_tables_of_a_long_run_hold_every_record_once_and_in_order(stored: Run, name: str, tmp_path: Path) -> None:
    write(stored, "parquet", tmp_path / "whole", None, long_from=NEVER)
    write(stored, "parquet", tmp_path / "ranges", None, long_from=1)
    expected, found = (
        pyarrow.parquet.read_table(tmp_path / folder / f"{name}.parquet") for folder in ("whole", "ranges")
    )
    assert found.equals(expected)


def test_step_without_an_end_is_none(stored: Run, tmp_path: Path) -> None:
    steps = read_detail(stored).extent.steps
    assert steps is not None
    for number in (steps[0] - 1, steps[1] + 1):
        with pytest.raises(NothingToShowError, match=f"none of the steps {number}:{number}"):
            write(stored, "kineto", tmp_path / "none", (number, number), long_from=1)


def test_scalars_of_a_long_run_are_those_of_the_whole_run(stored: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_shown(read_detail(stored)).series
    monkeypatch.setattr(long_log_survey, "LONG_LOG", 1)
    monkeypatch.setattr(long_log_survey, "ROWS_AT_ONCE", 40)
    run = read_to_sum(stored, THIS_PROCESS)
    assert run.surveys.ranges is not None
    shown = read_shown_by_ranges(run, THIS_PROCESS)
    assert shown.traces
    assert [own.rank for own in shown.series] == [own.rank for own in whole]
    for found, expected in zip(shown.series, whole, strict=True):
        assert found.numbers.tolist() == expected.numbers.tolist()
        assert found.ended_s == pytest.approx(expected.ended_s)
        assert set(found.columns) >= set(expected.columns)
        for tag, values in expected.columns.items():
            # A device works off what its host issued steps ago: at the ends of a range not all of that is read.
            tolerance = (
                0.03 if any("nccl" in (group.backend or "") for group in run.surveys.distinct_groups()) else 1e-9
            )
            np.testing.assert_allclose(found.columns[tag], values, rtol=tolerance, err_msg=tag)
