"""Traces of torch.profiler become runs whose figures can be worked out by hand."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.kineto_traces import Shape, write_traces
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.cli.main import main
from dtprof.errors import NotATraceError
from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_run import write_imported
from dtprof.records import events
from dtprof.records.reader import open_run

US = 1_000


def imported(tmp_path: Path, *paths: Path) -> Summary:
    run, _ = import_files(paths)
    write_imported(run, tmp_path / "run")
    return summarise(open_run(tmp_path / "run"))


def one(summary: Summary, op: str) -> Any:
    (row,) = [row for row in summary.collectives if row.op == op]
    return row


def test_exposed_time_of_kernels_is_when_no_other_kernel_runs(tmp_path: Path) -> None:
    """A layer is three kernels of 90 us, 10 apart; its all-reduce follows it beside the next layer, for 150 us.

    Of that 10 us lie between kernels, and of the last layer all; rank 1 comes 40 us later each time.
    """
    summary = imported(tmp_path, *write_traces(tmp_path / "traces", Shape(ranks=2, steps=4, layers=4, kernels=3)))
    assert (summary.world_size, summary.backend, summary.hosts) == (2, "nccl", ("node",))
    assert summary.steps.used == (2, 5)
    first, second = summary.ranks
    assert first.partition_ns is not None
    assert second.partition_ns is not None
    assert first.partition_ns["compute"] == second.partition_ns["compute"] == 4 * 3 * 90 * US
    assert first.partition_ns["exposed_wait"] == 40 * US
    assert first.partition_ns["exposed_transfer"] == (3 * 10 + 110) * US
    assert second.partition_ns["exposed_wait"] == 0
    assert second.partition_ns["exposed_transfer"] == (3 * 10 + 110) * US
    assert sum(first.partition_ns.values()) == first.step_ns
    row = one(summary, "all_reduce")
    assert (row.group, row.count, row.bytes) == ("0", 4 * 4, 4 << 20)
    assert row.duration_ns == (150 + 110) // 2 * US
    assert row.wait_ns == 20 * US
    assert row.transfer_ns == 110 * US
    assert row.exposed_ns == (45 + 35) // 2 * US
    # In flight 150 and 110, exposed 45 and 35 of them: 1 - 80 / 260.
    assert row.overlap == pytest.approx(1 - 80 / 260)
    # nccl-tests: all_reduce of S bytes in t on n ranks moves 2 (n - 1) / n * S / t; here n = 2.
    assert row.busbw_gb_per_s == pytest.approx((4 << 20) / (110 * US))


def test_times_before_zero_are_times_like_others(tmp_path: Path) -> None:
    """A trace may count from any moment, one inside it too."""
    paths = write_traces(tmp_path / "traces", Shape(ranks=2, steps=4, layers=4, kernels=3))
    expected = imported(tmp_path, *paths)
    shutil.rmtree(tmp_path / "run")
    traces = [json.loads(path.read_text()) for path in paths]
    times = sorted(event["ts"] for event in traces[0]["traceEvents"] if "ts" in event)
    for path, trace in zip(paths, traces, strict=True):
        del trace["baseTimeNanoseconds"]
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] -= times[len(times) // 2]
        path.write_text(json.dumps(trace))
    assert imported(tmp_path, *paths).ranks == expected.ranks


def test_what_the_format_lacks_is_null_with_the_reason(tmp_path: Path) -> None:
    summary = imported(tmp_path, *write_traces(tmp_path / "traces", Shape()))
    assert summary.overhead.capture_ns_per_event is None
    assert all(rank.peak_bytes is None for rank in summary.ranks)
    subjects = {reason.partition(":")[0] for reason in summary.cannot_tell}
    assert {"overhead", "idle", "memory", "phases", "pipeline", "api"} <= subjects
    assert len([reason for reason in summary.cannot_tell if reason.startswith("memory:")]) == 1


def test_packed_files_and_directories_give_the_same(tmp_path: Path) -> None:
    paths = write_traces(tmp_path / "plain", Shape())
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in paths:
        (packed / f"anything-{path.name}.x").write_bytes(gzip.compress(path.read_bytes()))
    (packed / "notes.txt").write_text("not a trace")
    plain, _ = import_files(paths)
    other, left_out = import_files([packed])
    assert left_out == ("notes.txt",)
    for a, b in zip(plain.ranks, other.ranks, strict=True):
        np.testing.assert_array_equal(a.records, b.records)


def trace(rank: int, rows: list[dict[str, Any]], **facts: Any) -> str:
    head = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2, "backend": "gloo"}} | facts
    return json.dumps(head | {"traceEvents": rows})


def event(category: str, name: str, begin: float, length: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    row = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "pid": 9, "tid": thread}
    return row | {"args": arguments}


def host_step(late: int) -> list[dict[str, Any]]:
    """Return a step of 1,000 us on a CPU: 200 us of data, forward, backward with an all_reduce under way, optimizer."""
    shapes = {"Input Dims": [[[25]], [], []], "Input type": ["TensorList", "", ""]}
    return [
        event("user_annotation", "ProfilerStep#3", 1000, 1000),
        event("user_annotation", "enumerate(DataLoader)#_It.__next__", 1000, 200),
        event("cpu_op", "aten::mm", 1200, 100),
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "ts": 1210, "pid": 9, "tid": 1},
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1400, 300),
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "ts": 1400, "pid": 9, "tid": 1, "bp": "e"},
        event("cpu_op", "aten::mm", 1400, 100),
        event("cpu_op", "c10d::allreduce_", 1500 + late, 10, **shapes),
        event("user_annotation", "gloo:all_reduce", 1520 + late, 280 - late, 77, **{"Input type": ["float"]}),
        event("cpu_op", "aten::add", 1600, 100),
        event("user_annotation", "Optimizer.step#SGD.step", 1900, 50),
    ]


def test_on_the_host_an_operation_lasts_from_its_call_to_the_end_of_its_work(tmp_path: Path) -> None:
    """The all_reduce is under way from 1,500 (rank 1: 1,540) to 1,800 us, and of that 1,600 to 1,700 is computed."""
    for rank, late in ((0, 0), (1, 40)):
        text = trace(rank, host_step(late), host_name="a", baseTimeNanoseconds=10**18)
        (tmp_path / f"t{rank}").write_text(text)
    summary = imported(tmp_path, tmp_path / "t0", tmp_path / "t1")
    row = one(summary, "all_reduce")
    assert (row.bytes, row.wait_ns, row.transfer_ns) == (100, 20 * US, 260 * US)
    assert row.exposed_ns == (200 + 160) // 2 * US
    parts = summary.ranks[0].partition_ns
    assert parts is not None
    assert summary.ranks[0].step_ns == 1000 * US
    assert (parts["exposed_wait"], parts["exposed_transfer"]) == (40 * US, 160 * US)
    assert (parts["data"], parts["optimizer"]) == (200 * US, 50 * US)
    # forward 1,210 to 1,400 with its operator from 1,200; backward 1,400 to 1,700 less what was blocked until 1,600
    assert parts["compute"] == (200 + 100 + 100) * US
    phases = summary.ranks[0].phases_ns
    assert phases is not None
    assert (phases["forward"], phases["backward"]) == (190 * US, 300 * US)


def test_operations_whose_group_is_not_known_meet_nobody(tmp_path: Path) -> None:
    """On gloo traces name no group: with groups of different members a wait would be a guess."""
    groups = [{"pg_name": "0", "ranks": [0, 1, 2]}, {"pg_name": "1", "ranks": [0, 1]}]
    for rank in (0, 1):
        info = {"rank": rank, "world_size": 3, "backend": "gloo", "pg_config": groups}
        text = trace(rank, host_step(40 * rank), host_name="a", baseTimeNanoseconds=10**18, distributedInfo=info)
        (tmp_path / f"t{rank}").write_text(text)
    summary = imported(tmp_path, tmp_path / "t0", tmp_path / "t1")
    row = one(summary, "all_reduce")
    assert (row.wait_ns, row.transfer_ns, row.busbw_gb_per_s) == (None, None, None)
    assert row.exposed_ns == (200 + 160) // 2 * US
    assert any(reason.startswith("wait_ns: which group") for reason in summary.cannot_tell)


def test_work_of_the_back_end_stands_for_calls_that_are_not_in_the_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        rows = [row for row in host_step(40 * rank) if not row["name"].startswith("c10d::")]
        (tmp_path / f"t{rank}").write_text(trace(rank, rows, host_name="a", baseTimeNanoseconds=10**18))
    row = one(imported(tmp_path, tmp_path / "t0", tmp_path / "t1"), "all_reduce")
    assert (row.group, row.wait_ns, row.transfer_ns) == ("0", 20 * US, 240 * US)


def test_ranks_that_began_in_different_steps_use_those_that_all_have(tmp_path: Path) -> None:
    for rank, first in ((0, 5), (1, 6)):
        rows = [event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 1000) for n in range(first, 10)]
        rows += [event("cpu_op", "aten::mm", 1000 * n, 10) for n in range(5, 10)]
        (tmp_path / f"t{rank}").write_text(trace(rank, rows))
    summary = imported(tmp_path, tmp_path / "t0", tmp_path / "t1")
    assert summary.steps.used == (2, 5)  # ProfilerStep 6 to 9


def test_operations_meet_where_ranks_began_in_different_steps(tmp_path: Path) -> None:
    """Rank 0 recorded two steps more, in which it sent 25 elements; from step 3 on both send alike."""
    earlier = []
    for number in (1, 2):
        for row in host_step(0):
            name = row["name"].replace("#3", f"#{number}")
            earlier.append(row | {"ts": row["ts"] - 1000 * (3 - number), "name": name})
    for rank, rows in ((0, [*earlier, *host_step(0)]), (1, host_step(40))):
        (tmp_path / f"t{rank}").write_text(trace(rank, rows, host_name="a", baseTimeNanoseconds=10**18))
    summary = imported(tmp_path, tmp_path / "t0", tmp_path / "t1")
    row = one(summary, "all_reduce")
    assert (row.count, row.wait_ns) == (1, 20 * US)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: [folder / "missing"], "does not exist"),
        (lambda folder: [write(folder / "e", b"")], "it is empty"),
        (lambda folder: [write(folder / "x", b"hello")], "begins with b'hello'"),
        (lambda folder: [write(folder / "x", b"\x1f\x8b\x08cut")], "packed by gzip and damaged"),
        (lambda folder: [write(folder / "x", b'{"schemaVersion": 1, "a": 2}')], "holds no trace events"),
        (lambda folder: [write(folder / "x", b'{"schemaVersion": 1, "traceEvents": []}')], "holds no event"),
        (lambda folder: twice(folder), "are both of rank 0"),
        (lambda folder: sizes(folder), "is of a job of 2 ranks and"),
        (lambda folder: unnamed(folder), "does not name its rank"),
        (lambda folder: mixed(folder), "expected files of one format"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_a_sentence(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(NotATraceError, match=said) as error:
        import_files(make(tmp_path))
    assert str(error.value).rstrip().endswith((".", ")"))


def test_a_directory_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "traces", Shape(ranks=1))[0].parent
    arguments = ["import", str(traces), "-o"]
    assert main([*arguments, str(tmp_path / "run")]) == 0
    assert main([*arguments, str(tmp_path / "run")]) == 2
    assert main([*arguments, str(tmp_path / "run"), "--force"]) == 0
    assert main([*arguments, str(traces), "--force"]) == 2
    shutil.copytree(traces, tmp_path / "run" / "traces")
    inside = str(tmp_path / "run" / "traces")
    assert main(["import", inside, "-o", str(tmp_path / "run"), "--force"]) == 2
    assert Path(inside, "rank0.json").exists()
    assert main(["summary", str(tmp_path / "run"), "--json"]) == 0


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def twice(folder: Path) -> list[Path]:
    paths = write_traces(folder / "a", Shape(ranks=1))
    return [*paths, shutil.copy(paths[0], folder / "again")]


def sizes(folder: Path) -> list[Path]:
    return [write_traces(folder / "a", Shape(ranks=2))[0], write_traces(folder / "b", Shape(ranks=3))[1]]


def unnamed(folder: Path) -> list[Path]:
    rows = [event("cpu_op", "aten::mm", 1, 1)]
    return [write(folder / name, trace(0, rows, distributedInfo=None)) for name in "ab"]


def mixed(folder: Path) -> list[Path]:
    timeline = (
        b'[\n{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "t"}},\n{"name": "NEGOTIATE_ALLREDUCE"}'
    )
    return [*write_traces(folder / "a", Shape(ranks=1)), write(folder / "h", timeline)]


def test_a_trace_that_was_cut_gives_what_it_holds_and_says_so(tmp_path: Path) -> None:
    path = write_traces(tmp_path / "traces", Shape(ranks=1))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    run, _ = import_files([path])
    assert len(run.ranks[0].records) > 0
    assert any("cut or damaged after" in note for note in run.ranks[0].notes)
    write_imported(run, tmp_path / "run")
    summary = summarise(open_run(tmp_path / "run"))
    assert any("cut or damaged after" in reason for reason in summary.cannot_tell)


def test_pieces_of_any_size_give_the_same_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_traces(tmp_path / "traces", Shape(ranks=1))[0]
    (expected,) = import_files([path])[0].ranks
    for size in (700, 1000, 4096, 65_537):
        monkeypatch.setattr("dtprof.interchange.importers.trace_stream.PIECE_BYTES", size)
        (found,) = import_files([path])[0].ranks
        np.testing.assert_array_equal(found.records, expected.records)


def test_memory_of_a_device_is_taken_from_the_trace(tmp_path: Path) -> None:
    arguments = {"Device Type": 1, "Total Allocated": 300, "Total Reserved": 1000}
    rows = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", "aten::mm", 1, 5),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 50, "pid": 1, "tid": 1, "args": arguments},
    ]
    path = write(tmp_path / "t", trace(0, rows))
    run, _ = import_files([path])
    assert events.CUDA_PEAK_ALLOCATED_BYTES in run.ranks[0].ops
