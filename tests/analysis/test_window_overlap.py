"""Overlap and time by kernels of a profiler window, from a trace written by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

from dtprof.analysis.results import WindowSummary
from dtprof.analysis.timeline.window_overlap import summarise_window
from dtprof.interchange.importers.window_trace import read_window
from dtprof.records.tables import Window


def summarise(tmp_path: Path, events: list[dict[str, Any]]) -> WindowSummary:
    file = tmp_path / "window-5-6.pt.trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": events}, stream)
    return summarise_window(read_window(file, Window(number=1, state="written", first=5, last=6)), 3)


def event(category: str, name: str, ts: float, dur: float, tid: int) -> dict[str, Any]:
    arguments = {"device": 0, "stream": tid, "correlation": int(ts)} if category == "kernel" else {}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def test_communication_under_computation_is_overlapped(tmp_path: Path) -> None:
    window = summarise(
        tmp_path,
        [
            event("kernel", "gemm", 1000, 100, 7),
            event("kernel", "gelu", 1150, 50, 7),
            # From 1050 to 1250: under gemm for 50 us, under gelu for 50 us, exposed for 50 + 50 us.
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 1050, 200, 20),
            event("cpu_op", "aten::mm", 900, 400, 1),
        ],
    )
    assert (window.rank, window.first, window.last, window.top_of) == (3, 5, 6, "kernels")
    assert (window.compute_ns, window.communication_ns, window.exposed_ns) == (150_000, 200_000, 100_000)
    assert window.overlap == 0.5
    assert [(share.name[:4], share.self_ns) for share in window.top] == [
        ("nccl", 200_000),
        ("gemm", 100_000),
        ("gelu", 50_000),
    ]


def test_without_kernels_the_overlap_is_unknown_and_operators_are_listed(tmp_path: Path) -> None:
    window = summarise(tmp_path, [event("cpu_op", "aten::mm", 900, 400, 1), event("cpu_op", "aten::add", 1400, 100, 1)])
    assert (window.compute_ns, window.communication_ns, window.exposed_ns, window.overlap) == (None,) * 4
    assert window.top_of == "operators of the host"
    assert [share.name for share in window.top] == ["aten::mm", "aten::add"]


def test_without_communication_there_is_no_overlap_to_tell(tmp_path: Path) -> None:
    window = summarise(tmp_path, [event("kernel", "gemm", 1000, 100, 7)])
    assert (window.communication_ns, window.exposed_ns, window.overlap) == (0, 0, None)
