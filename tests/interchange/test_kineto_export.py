"""Traces of torch.profiler's kind, read by the back end of torch-tb-profiler itself."""

import gzip
import logging
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.timeline.operation_detail import RunDetail, read_detail
from dtprof.interchange.exporters.kineto_export import COUNTED, NEAREST, write_kineto
from dtprof.records.reader import Run, open_run
from tests.builders import MemoryRun, RankBuilder
from tests.interchange.test_chrome_trace import read
from tests.synthetic import Job, generate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch_tb_profiler.profiler.data import DistributedRunProfileData, RunProfileData
    from torch_tb_profiler.profiler.loader import RunLoader
    from torch_tb_profiler.profiler.run_generator import RunGenerator

US = 1000


class Profiles:
    """What the package makes of a folder; its loader does the same in a process a file."""

    def __init__(self, folder: Path) -> None:
        cache = tempfile.mkdtemp(dir=folder.parent)
        files = sorted(folder.glob("*.pt.trace.json.gz"))
        datas = [RunProfileData.parse(path.name.split(".")[0], None, str(path), cache) for path in files]
        self.workers = [RunGenerator(data.worker, None, data).generate_run_profile() for data in datas]
        loader = RunLoader.__new__(RunLoader)
        loader.run_name = "run"
        distributed = [DistributedRunProfileData(data) for data in datas]
        self.distributed = loader._process_distributed_profiles(distributed, None)


def step_us(profile: Any) -> dict[int, float]:
    """Return the total of each step of the overview."""
    return {
        int(row[0]): sum(cell for cell in row[1:] if not isinstance(cell, str))
        for row in profile.overview["steps"]["rows"]
    }


@pytest.mark.filterwarnings("ignore")
def test_the_overview_shows_our_steps_and_parts(detail: RunDetail, out: Path, summary: Summary, used: range) -> None:
    assert write_kineto(detail, out) == []
    profiles = Profiles(out)
    for rank, profile in zip(summary.ranks, profiles.workers, strict=True):
        totals = step_us(profile)
        assert sum(totals[step] for step in used) / len(used) == pytest.approx((rank.step_ns or 0) / US, abs=0.01)
        columns = [column.get("name") for column in profile.overview["steps"]["columns"]]
        loads = {int(row[0]): row[columns.index("DataLoader")] for row in profile.overview["steps"]["rows"]}
        assert rank.partition_ns is not None
        mean = sum(loads[step] for step in used) / len(used)
        assert mean == pytest.approx(rank.partition_ns["data"] / US, abs=0.01)


JOBS = {
    "ddp": Job(dp=4, steps=3),
    "tensor parallel": Job(tp=2, dp=2, steps=3),
    "pipeline": Job(pp=2, dp=2, microbatches=2, steps=3),
    "pipeline of unequal stages": Job(pp=4, microbatches=2, steps=3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JOBS)
def test_every_layout_has_a_distributed_view_with_our_calls_and_bytes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(tmp_path / "run", JOBS[name])
    run: Run = open_run(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        write_kineto(read_detail(run), tmp_path / "out")
        profiles = Profiles(tmp_path / "out")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert profiles.distributed is not None
    for profile in profiles.workers:
        assert {view.display_name for view in profile.views} >= {"Overview", "Trace", "Memory"}
    assert {view.display_name for view in profiles.distributed.views} == {"Distributed"}
    calls, nbytes = our_calls(run)
    for table in profiles.distributed.comm_ops["data"].values():
        assert {row[0] for row in table["rows"]} <= {f"gloo:{op}" for op in COUNTED}
    for op in COUNTED:
        rows = [
            row for t in profiles.distributed.comm_ops["data"].values() for row in t["rows"] if row[0] == f"gloo:{op}"
        ]
        filled = fillers(tmp_path / "out", op)
        assert sum(row[1] for row in rows) - filled == calls.get(op, 0)
        assert sum(row[2] for row in rows) == nbytes.get(op, 0)


def our_calls(run: Run) -> tuple[dict[str, int], dict[str, int]]:
    """Return calls and bytes of all ranks by the name that they are counted under, from the records themselves."""
    calls: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    detail = read_detail(run)
    for rank in detail.ranks:
        tables, windows = run.load(rank), detail.steps[rank].windows
        for row in tables.operations:
            if any(begin <= row["issued_ns"] and row["done_ns"] <= end for begin, end in windows.tolist()):
                name = tables.ops[row["op"]]
                op = name if name in COUNTED else NEAREST.get(name, "all_reduce")
                calls[op] = calls.get(op, 0) + 1
                nbytes[op] = nbytes.get(op, 0) + int(row["nbytes"])
    return calls, nbytes


def fillers(folder: Path, op: str) -> int:
    """Return how many empty operations were put in."""
    events = [event for path in folder.glob("*.gz") for event in read(path)["traceEvents"]]
    return sum(
        event["name"] == f"gloo:{op}" and event["args"].get("Collective name", "").startswith("none")
        for event in events
    )


@pytest.mark.filterwarnings("ignore")
def test_of_a_collective_of_all_the_last_to_come_transfers_and_the_others_wait(tmp_path: Path) -> None:
    ranks = [RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)]
    for rank, late in zip(ranks, (0, 30_000), strict=True):
        for step in range(3):
            at = 1_000_000 * step
            rank.span("backward", at, at + 500_000)
            rank.op("all_reduce", at + 600_000 + late, at + 680_000, nbytes=64)
            rank.span("optimizer", at + 700_000, at + 800_000)
    write_kineto(read_detail(MemoryRun(ranks)), tmp_path / "out")
    waits = Profiles(tmp_path / "out").distributed.steps_to_wait["data"]["all"]
    # 80 us from its issue to its end for the first, 50 us for the second: 50 of transfer, 30 of waiting
    assert waits["rank00000"] == pytest.approx([50, 30], abs=1)
    assert waits["rank00001"] == pytest.approx([50, 0], abs=1)
    row = next(row for row in summarise(MemoryRun(ranks)).collectives if row.op == "all_reduce")
    assert (row.transfer_ns, row.wait_ns) == (50_000, 15_000)


def test_memory_and_names_are_there(tmp_path: Path) -> None:
    rank = RankBuilder(0, world_size=1)
    for step in range(4):
        rank.span("backward", 100 * step, 100 * step + 50)
        rank.span("optimizer", 100 * step + 50, 100 * step + 90)
        rank.sample("rss_bytes", 100 * step + 90, 1 << 20 + step)
    write_kineto(read_detail(MemoryRun([rank])), tmp_path / "out")
    document = read(tmp_path / "out" / "rank00000.pt.trace.json.gz")
    held = [event["args"]["Total Allocated"] for event in document["traceEvents"] if event["name"] == "[memory]"]
    assert held == [1 << 20 + step for step in range(4)]
    assert document["distributedInfo"] == {"backend": "gloo", "rank": 0, "world_size": 1}
    steps = [event["name"] for event in document["traceEvents"] if event["name"].startswith("ProfilerStep")]
    assert steps == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    # HolisticTraceAnalysis 0.5 finds the rank by this expression in the text of the file
    with gzip.open(tmp_path / "out" / "rank00000.pt.trace.json.gz", "rt", encoding="utf-8") as file:
        assert re.search(r'"rank": (\d+)', file.read()) is not None
