"""Windows of torch.profiler as slices of both formats of traces, read back."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtprof.analysis.timeline.operation_detail import RunDetail, read_detail
from dtprof.interchange.exporters.chrome_trace import write_chrome
from dtprof.interchange.exporters.perfetto_trace import write_perfetto
from dtprof.interchange.exporters.trace_tracks import WINDOWS
from dtprof.records.reader import open_run
from dtprof.records.tables import ExceptionRecord, Window
from tests.builders import MemoryRun
from tests.interchange import test_chrome_trace, test_perfetto_trace
from tests.interchange.reading_traces import Slice
from tests.synthetic import HostClock, Job, generate

LATER_NS = 3_000_000_000


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> RunDetail:
    """Two hosts of one rank, the clock of the second 3 s ahead; each rank took a window as long as its run."""
    folder = tmp_path_factory.mktemp("traced") / "run"
    generate(folder, Job(dp=2, steps=6, ranks_per_host=1, clocks={1: HostClock(offset_ns=LATER_NS)}))
    run = open_run(folder)
    ranks = []
    for tables in run.load_all():
        begin, end = tables.first_ns, tables.last_ns
        done = Window(
            number=1, state="written", first=1, last=2, begin_ns=begin, end_ns=end - 5000, ready_ns=end, file="w.json"
        )
        refused = Window(number=2, state="failed", first=4, last=5, reason="kineto is busy")
        cut = Window(number=3, state="begun", first=6, last=7, begin_ns=end)
        error = ExceptionRecord(t_ns=end, type="ValueError", message="", traceback="", frame=None)
        ranks.append(replace(tables, windows=(done, refused, cut), exceptions=(error,)))
    return read_detail(MemoryRun(ranks, clocks=run.host_clocks()))


def edges(slices: list[Slice], rank: int) -> tuple[int, int]:
    """Return when the records of a rank begin and end, as other slices show it."""
    own = [one for one in slices if one.rank == rank and one.track != WINDOWS]
    return min(one.begin_ns for one in own), max(one.end_ns for one in own)


def test_perfetto_shows_where_windows_lay_on_the_clock_of_the_run(traced: RunDetail, out: Path) -> None:
    assert write_perfetto(traced, out, steps=(6, 6)) == []
    found = test_perfetto_trace.read(out)
    assert found.open == [(WINDOWS, "steps 6 to 7")] * 2
    of_run = traced.first_ns
    for rank in (0, 1):
        window, writing = (one for one in found.slices if (one.rank, one.track) == (rank, WINDOWS))
        assert (window.name, writing.name) == ("steps 1 to 2", "writing the trace")
        assert window.arguments == writing.arguments == {"state": "written", "file": "w.json"}
        assert writing.begin_ns == window.end_ns
        assert writing.end_ns - writing.begin_ns == pytest.approx(5000, abs=2)
        assert abs(window.begin_ns - of_run) < LATER_NS / 10  # not 3 s away
        assert abs(writing.end_ns - edges(found.slices, rank)[1]) < LATER_NS / 10
    (first, _), (second, _) = found.instants
    assert abs(first - second) < LATER_NS / 10


def test_chrome_shows_the_same(traced: RunDetail, out: Path) -> None:
    write_chrome(traced, out)
    slices, _ = test_chrome_trace.slices_of(test_chrome_trace.read(out))
    for rank in (0, 1):
        own = [one for one in slices if (one.rank, one.track) == (rank, WINDOWS)]
        assert [one.name for one in own] == ["steps 1 to 2", "writing the trace", "steps 6 to 7"]
        assert own[2].arguments == {"state": "begun", "file": "-", "not done": True}
        begin, end = edges(slices, rank)
        assert own[0].begin_ns <= begin
        assert own[1].end_ns <= end + 1000
