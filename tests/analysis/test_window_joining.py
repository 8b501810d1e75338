"""Windows of torch.profiler beside the records of their rank: what is matched, what took the time, what is left out."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.analysis.timeline.window_joining import (
    JoinedWindow,
    RankWindows,
    explain_missing,
    join_window,
    without_trace,
)
from dtprof.interchange.importers.window_trace import read_window
from dtprof.records.tables import RankTables, Window
from tests.builders import START_NS, WALL_CLOCK_NS, MemoryRun, RankBuilder

BASE_NS = WALL_CLOCK_NS - 1_000_000_000
MS, US = 1_000_000, 1_000
WINDOW = Window(
    number=1,
    state="written",
    first=2,
    last=2,
    begin_ns=START_NS,
    end_ns=START_NS + 100 * MS,
    ready_ns=START_NS + 101 * MS,
    file="window-2-2.pt.trace.json.gz",
    realtime_ns=WALL_CLOCK_NS,
)


def event(category: str, name: str, begin: int, end: int, tid: int = 7, **arguments: Any) -> dict[str, Any]:
    """An event of a trace, times in ns after the begin of the window, which is WALL_CLOCK_NS."""
    ts = (WALL_CLOCK_NS - BASE_NS + begin) / 1000
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": ts,
        "dur": (end - begin) / 1000,
        "pid": 1,
        "tid": tid,
        "args": arguments,
    }


def join(tmp_path: Path, tables: RankTables, events: list[dict[str, Any]]) -> JoinedWindow:
    file = tmp_path / WINDOW.file
    with gzip.open(file, "wt") as stream:
        json.dump({"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "traceEvents": events}, stream)
    return join_window(read_window(file, WINDOW), tables)


def test_a_call_belongs_to_the_record_issued_within_it_also_when_its_neighbours_are_missing(tmp_path: Path) -> None:
    rank = RankBuilder(0, world_size=2)
    # Four records; of the second (of another thread) the trace knows nothing.
    for issued in (10, 20, 30):
        rank.op("all_reduce", issued * MS + 5 * US, issued * MS + 2 * MS)
    rank.op("broadcast", 30 * MS + 900 * US, 33 * MS)
    joined = join(
        tmp_path,
        rank.tables(),
        [
            event("cpu_op", "c10d::allreduce_", 10 * MS, 10 * MS + 500 * US),
            event("cpu_op", "gloo:all_reduce", 10 * MS + 100 * US, 12 * MS, tid=8),
            event("cpu_op", "c10d::allreduce_", 30 * MS, 30 * MS + 500 * US),
            event("cpu_op", "gloo:all_reduce", 30 * MS + 100 * US, 32 * MS, tid=8),
            event("cpu_op", "c10d::broadcast_", 30 * MS + 890 * US, 31 * MS),
            # Issued 50 ms later than any record: nobody's.
            event("cpu_op", "c10d::broadcast_", 80 * MS, 81 * MS),
        ],
    )
    assert (joined.traced, joined.matched, joined.recorded) == (4, 3, 4)
    assert joined.share == 0.75
    reduced, sent = sorted(joined.operations, key=lambda row: row.op)
    assert (reduced.op, reduced.count, reduced.matched) == ("all_reduce", 2, 2)
    # 12 ms - 10.005 ms recorded; 12 ms - 10 ms in the trace.
    assert (reduced.recorded_ns, reduced.traced_ns, reduced.issued_apart_ns) == (1_995_000, 2_000_000, 5_000)
    assert (sent.op, sent.count, sent.matched, sent.issued_apart_ns) == ("broadcast", 2, 1, 10_000)


@pytest.mark.parametrize(("traced_ms", "matched"), [((10, 17, 30), 3), ((10, 16, 17, 30), 2), ((10, 20, 33), 3)])
def test_calls_read_late_on_a_busy_machine_match_in_order_where_they_are_as_many_as_records(
    tmp_path: Path, traced_ms: tuple[int, ...], matched: int
) -> None:
    rank = RankBuilder(0, world_size=2)
    for issued in (10, 20, 30):
        rank.op("all_reduce", issued * MS + 5 * US, issued * MS + 2 * MS)
    calls = [event("cpu_op", "c10d::allreduce_", at * MS, at * MS + 500 * US) for at in traced_ms]
    joined = join(tmp_path, rank.tables(), calls)
    assert (joined.traced, joined.matched) == (len(traced_ms), matched)


def test_a_kernel_belongs_to_the_record_within_whose_call_it_was_launched(tmp_path: Path) -> None:
    rank = RankBuilder(0, world_size=2)
    rank.op("all_reduce", 10 * MS, None, returned=11 * MS, is_async=True)
    rank.op("all_reduce", 12 * MS, None, returned=13 * MS, is_async=True, device=7 * MS)
    # Two messages of one batch, sent by one kernel that is launched when the batch ends.
    rank.op("send", 14 * MS, None, returned=14 * MS + 1, is_async=True, peer=1)
    rank.op("recv", 15 * MS, None, returned=15 * MS + 1, is_async=True, peer=1)
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    messages = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    launches = [(10 * MS + 1, 1), (12 * MS + 1, 2), (16 * MS, 3), (90 * MS, 4)]
    joined = join(
        tmp_path,
        rank.tables(),
        [event("cuda_runtime", "cudaLaunchKernelExC", at, at + 10, correlation=number) for at, number in launches]
        + [
            event("kernel", kernel, 20 * MS, 25 * MS, tid=0, correlation=1),
            event("kernel", kernel, 30 * MS, 37 * MS, tid=0, correlation=2),
            event("kernel", messages, 40 * MS, 41 * MS, tid=0, correlation=3),
            event("kernel", kernel, 91 * MS, 92 * MS, tid=0, correlation=4),  # of a graph: no call launched it
            event("kernel", "gemm", 20 * MS, 60 * MS, tid=1, correlation=9),
        ],
    )
    assert joined.has_device
    assert (joined.traced, joined.matched) == (4, 3)
    reduced, sent = sorted(joined.operations, key=lambda row: row.op)
    # The second kernel took 7 ms, and so did its record on the device; the first has no time to be compared with.
    assert (reduced.count, reduced.matched, reduced.recorded_ns, reduced.traced_ns) == (3, 2, 7 * MS, 7 * MS)
    assert (sent.op, sent.matched) == ("sendrecv", 1)
    assert [(share.name, share.self_ns) for share in joined.shares[:1]] == [("gemm", 40 * MS)]


def test_own_time_of_an_operator_is_without_what_ran_inside_it(tmp_path: Path) -> None:
    joined = join(
        tmp_path,
        RankBuilder(0, world_size=1).tables(),
        [
            event("cpu_op", "aten::linear", 0, 10 * MS),
            event("cpu_op", "aten::t", 1 * MS, 2 * MS),
            event("cpu_op", "aten::addmm", 2 * MS, 9 * MS),
            event("cpu_op", "aten::copy_", 3 * MS, 5 * MS),
            event("cpu_op", "aten::copy_", 3 * MS, 4 * MS, tid=8),  # another thread is not inside
            event("cpu_op", "aten::add", 10 * MS, 11 * MS),
        ],
    )
    own = {share.name: (share.count, share.total_ns / MS, share.self_ns / MS) for share in joined.shares}
    assert own == {
        "aten::linear": (1, 10, 2),
        "aten::addmm": (1, 7, 5),
        "aten::copy_": (2, 3, 3),
        "aten::t": (1, 1, 1),
        "aten::add": (1, 1, 1),
    }
    assert joined.share is None
    assert joined.clock_ns == 0


def run_of_steps(windows: dict[int, tuple[Window, ...]], num_steps: int = 20) -> MemoryRun:
    """Two ranks with steps of 10 ms, those with a window five times as long."""
    ranks = []
    for number in range(2):
        rank, now = RankBuilder(number, world_size=2), 0
        for step in range(1, num_steps + 1):
            end = now + (50 if any(w.first <= step <= w.last + 1 for own in windows.values() for w in own) else 10) * MS
            rank.span("backward", now, end - MS)
            rank.op("all_reduce", end - 3 * MS, end - 2 * MS, nbytes=64)
            rank.span("optimizer", end - MS, end)
            now = end
        rank.windows = windows.get(number, ())
        ranks.append(rank)
    return MemoryRun(ranks)


def window(first: int, last: int) -> Window:
    return Window(number=1, state="written", first=first, last=last, begin_ns=1)


@pytest.mark.parametrize(
    ("windows", "used", "said"),
    [
        ({}, (2, 20), None),
        # Rank 1 waited for rank 0: its steps are left out, too; step 7 is the one in which the trace was written.
        ({0: (window(5, 6),)}, (8, 20), "rank 0 took profiler windows"),
        ({0: (window(15, 16),)}, (2, 14), "longest row of steps without one"),
        ({0: (window(2, 10),), 1: (window(13, 19),)}, (2, 20), "too few are without one"),
        ({0: (Window(number=1, state="failed", first=5, last=6),)}, (2, 20), None),  # refused: nothing was slowed
    ],
)
def test_figures_are_of_steps_without_a_window(
    windows: dict[int, tuple[Window, ...]], used: tuple[int, int], said: str | None
) -> None:
    summary = summarise(run_of_steps(windows))
    assert summary.steps.used == used
    joined = [text for text in summary.cannot_tell if "profiler windows" in text]
    assert len(joined) == (said is not None)
    assert all(str(said) in text for text in joined)
    if used != (2, 20) or not windows:
        assert summary.steps.duration_ns is not None
        assert summary.steps.duration_ns.median == 10 * MS


def test_figures_are_of_all_steps_where_windows_in_turn_take_few_of_them() -> None:
    # Three windows of two steps, each with the step that writes its trace: 9 of 999 steps.
    summary = summarise(run_of_steps({0: (window(100, 101), window(700, 701)), 1: (window(400, 401),)}, 1000))
    assert summary.steps.used == (2, 1000)
    assert [text for text in summary.cannot_tell if "figures use all steps, 9 of them with one" in text]


def test_windows_that_were_planned_and_not_taken_are_reported() -> None:
    early = Window(number=1, state="written", first=5, last=8, begin_ns=1, reason="ended early: the job ended")
    ranks = [
        RankWindows(rank=0, folder="", windows=(without_trace(early, 0),), snapshots=(), steps=7),
        RankWindows(rank=1, folder="", windows=(), snapshots=(), steps=3),
    ]
    assert explain_missing(ranks, planned=None, chosen=(), world_size=2) == []
    assert explain_missing(ranks, planned=(5, 8), chosen=(), world_size=2) == [
        "rank 1 took no window over steps 5 to 8: 3 steps had ended",
        "rank 0: the window ended early: the job ended",
    ]
    assert explain_missing(ranks[:1], planned=(5, 8), chosen=[(0, 0), (9, 9)], world_size=2) == [
        "rank 9 takes no window: the job has ranks 0 to 1",
        "rank 0: the window ended early: the job ended",
    ]
