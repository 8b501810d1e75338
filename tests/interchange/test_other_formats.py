"""Tables of StragglerAnalysis, timelines of Horovod, traces of XLA and Flight Recorder dumps become runs."""

import json
import pickle
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.errors import DtprofError, NotARunError, NotATraceError
from dtprof.interchange.importers import imported_files
from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_run import write_imported
from dtprof.records.reader import open_run
from dtprof.session import diagnosis_inputs

US, MS = 1_000, 1_000_000


def imported(tmp_path: Path, *paths: Path) -> Summary:
    run, _ = import_files(paths)
    write_imported(run, tmp_path / "run")
    return summarise(open_run(tmp_path / "run"))


def subjects(summary: Summary) -> set[str]:
    return {reason.partition(":")[0] for reason in summary.cannot_tell}


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def timeline() -> str:
    """Return two operations of two ranks: rank 1 is ready 300 and 100 us after rank 0; the second lasts 400 us."""
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 10**15}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "layer"}},
    ]
    for begin, late, length in ((1000, 300, 200), (3000, 100, 400)):
        started = begin + late + 50
        rows += [
            {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": begin, "pid": 1},
            {"ph": "X", "name": "0", "ts": begin, "pid": 1, "dur": 0},
            {"ph": "X", "name": "1", "ts": begin + late, "pid": 1, "dur": 0},
            {"ph": "E", "ts": begin + late, "pid": 1},
            {"ph": "B", "name": "ALLREDUCE", "ts": started, "pid": 1},
            {"ph": "B", "name": "NCCL_ALLREDUCE", "ts": started + 10, "pid": 1},
            {"ph": "E", "ts": started + length - 10, "pid": 1},
            {"ph": "E", "ts": started + length, "pid": 1, "args": {"dtype": "float32", "shape": "[10, 100]"}},
        ]
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "]"


def test_a_rank_of_horovod_arrives_when_it_is_ready(tmp_path: Path) -> None:
    summary = imported(tmp_path, write(tmp_path / "any-name", timeline()))
    (row,) = summary.collectives
    assert (summary.world_size, row.op, row.count, row.bytes) == (2, "all_reduce", 2, 4000)
    # Rank 0 waits 300 and 100 us for rank 1, which waits for nobody; transfers last 250 and 450 us from there.
    assert row.wait_ns == (300 + 100) // 4 * US
    assert row.transfer_ns == 350 * US
    assert row.exposed_ns is None
    assert row.overlap is None
    assert {"exposed_ns", "partition", "memory"} <= subjects(summary)


def test_fused_tensors_of_horovod_are_no_steps(tmp_path: Path) -> None:
    """Both gradients of a step are negotiated and reduced together, written as TimelineWriter of 0.28.1 does."""
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 10**15}}
    ]
    for step in range(12):
        t = 10_000 * step
        rows.append({"ph": "i", "name": "CYCLE_START", "ts": t, "s": "g"})
        for pid in (1, 2):
            at = t + 1000 + pid
            rows += [
                {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": at, "pid": pid},
                {"ph": "X", "name": "0", "ts": at, "pid": pid, "dur": 0},
                {"ph": "X", "name": "1", "ts": at + 400, "pid": pid, "dur": 0},
                {"ph": "E", "ts": at + 401, "pid": pid},
            ]
        for begins, name, ts in ((True, "ALLREDUCE", 1500), (True, "GLOO_ALLREDUCE", 1510), (False, "", 1900)):
            event = {"ph": "B", "name": name} if begins else {"ph": "E"}
            rows += [event | {"ts": t + ts, "pid": pid} for pid in (1, 2)]
        end = {"ph": "E", "ts": t + 2000, "args": {"dtype": "float32", "shape": "[128, 64]"}}
        rows += [end | {"pid": pid} for pid in (1, 2)]
    summary = imported(tmp_path, write(tmp_path / "t", "[\n" + ",".join(map(json.dumps, rows)) + "]"))
    (row,) = summary.collectives
    assert (summary.world_size, summary.steps.count, row.count, row.bytes) == (2, 0, 24, 32_768)
    assert row.wait_ns == 200 * US  # rank 0 waits 400 us for rank 1, which waits for nobody


def test_a_timeline_that_was_cut_gives_what_it_holds(tmp_path: Path) -> None:
    text = timeline()
    summary = imported(tmp_path, write(tmp_path / "t", text[: text.rindex('{"ph": "B"')]))
    assert [row.count for row in summary.collectives] == [1]
    assert any("cut or damaged" in reason for reason in summary.cannot_tell)


def hlo(op: str, begin: float, length: float, device: int, **arguments: str) -> dict[str, Any]:
    told = {"hlo_op": op, "hlo_module": "jit_step", "device_ordinal": str(device)} | arguments
    return {"ph": "X", "pid": 7, "tid": device, "ts": begin, "dur": length, "name": op, "args": told}


def xla(told: bool) -> dict[str, Any]:
    """Return one step of two devices: 500 us of fusion, an all-reduce from 400 (device 1: 450) to 700 us."""
    text = "%all-reduce-start.1 = f32[64,4]{1,0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add"
    arguments = {"long_name": text} if told else {}
    rows: list[dict[str, Any]] = [
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 7, "tid": 9, "ts": 0, "dur": 1000, "name": "train", "args": {"step_num": "4"}},
    ]
    for device, late in ((0, 0), (1, 50)):
        rows += [
            hlo("fusion.1", 0, 500, device),
            hlo("while.2", 0, 900, device),
            hlo("all-reduce-start.1", 400 + late, 10, device, **arguments),
            hlo("all-reduce-done.1", 690, 10, device),
        ]
    return {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": rows}


def test_an_xla_collective_lasts_from_its_start_to_its_done(tmp_path: Path) -> None:
    summary = imported(tmp_path, write(tmp_path / "t", xla(told=True)))
    (row,) = summary.collectives
    assert (summary.world_size, row.op, row.group, row.bytes) == (2, "all_reduce", "0,1", 64 * 4 * 4)
    assert (row.wait_ns, row.transfer_ns, row.exposed_ns) == (25 * US, 250 * US, 200 * US)
    parts = summary.ranks[0].partition_ns
    assert parts is not None
    assert (parts["compute"], parts["exposed_transfer"], parts["idle"]) == (500 * US, 200 * US, 300 * US)


def test_xla_groups_that_are_not_known_leave_waits_unknown(tmp_path: Path) -> None:
    summary = imported(tmp_path, write(tmp_path / "t", xla(told=False)))
    (row,) = summary.collectives
    assert (row.wait_ns, row.transfer_ns, row.busbw_gb_per_s) == (None, None, None)
    assert row.exposed_ns == 200 * US
    assert {"wait_ns", "bytes"} <= subjects(summary)


def dump(rank: int, created: list[int]) -> dict[str, Any]:
    frames = [{"filename": "/srv/train.py", "line": 12, "name": "main"}]
    entries = [
        {
            "record_id": i,
            "collective_seq_id": i + 1,
            "p2p_seq_id": 0,
            "process_group": ("0", "default_pg"),
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 10**18 + at,
            "time_discovered_started_ns": 10**18 + at,
            "time_discovered_completed_ns": 10**18 + at + 9 * MS,
            "duration_ms": 2.0 if rank else 3.0,
            "input_sizes": [[1000]],
            "output_sizes": [[1000]],
            "input_dtypes": ["Float"],
            "state": "completed",
            "retired": True,
            "frames": frames,
            "timeout_ms": 1000,
            "is_p2p": False,
        }
        for i, at in enumerate(created)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


@pytest.mark.parametrize("packed", [True, False])
def test_operations_of_dumps_last_as_long_as_their_devices_measured(tmp_path: Path, packed: bool) -> None:
    paths = []
    for rank in (0, 1):
        held = dump(rank, [0, 20 * MS, 40 * MS])
        path = tmp_path / f"dump_{rank}"
        path.write_bytes(pickle.dumps(held) if packed else json.dumps(held).encode())
        paths.append(path)
    summary = imported(tmp_path, *paths)
    (row,) = summary.collectives
    assert (row.op, row.count, row.bytes) == ("all_reduce", 3, 4000)
    # 3 ms on rank 0 and 2 on rank 1: who was fastest waited for nobody.
    assert (row.duration_ns, row.transfer_ns, row.wait_ns) == (2500 * US, 2 * MS, 500 * US)
    assert row.exposed_ns is None
    site = next(iter(open_run(tmp_path / "run").load(0).sites.values()))
    assert (site.file, site.line) == ("/srv/train.py", 12)
    # What is left of dumps in a run is no ground for a verdict: a hang would be healthy.
    with pytest.raises(NotARunError, match="was imported from Flight Recorder dumps"):
        diagnosis_inputs.sort_inputs([tmp_path / "run"])


def test_a_pickle_that_would_run_code_runs_none(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "dump_0").write_bytes(pickle.dumps({"entries": [Trap()]}))
    with pytest.raises(DtprofError):
        import_files([tmp_path / "dump_0"])
    assert not (tmp_path / "sprung").exists()


def straggler_table(path: Path, **changes: Any) -> Path:
    """Write two stages and two steps, two microbatches: 10 ms forward and 20 backward, the second stage twice that."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows: list[tuple[int, str, float, float, int]] = []
    for step in (3, 8):
        rows += [
            *((step, 0, "forward-compute", 0.01 * i, 0.01, i) for i in range(2)),
            (step, 0, "forward-send", 0.01, 0.002, -1),
            (step, 1, "forward-recv", 0.0, 0.012, -1),
            *((step, 1, "forward-compute", 0.012 + 0.06 * i, 0.02, i) for i in range(2)),
            *((step, 1, "backward-compute", 0.032 + 0.06 * i, 0.04, i) for i in range(2)),
            *((step, 0, "backward-compute", 0.08 + 0.06 * i, 0.02, i) for i in range(2)),
            *((step, stage, "optimizer", 0.16, 0.01, -1) for stage in (0, 1)),
            *((step, stage, "odd-thing", 0.17, 0.0, -1) for stage in (0, 1)),
        ]  # type: ignore[list-item]
    table = {
        "dp_rank": [0] * len(rows),
        "stage": [row[1] for row in rows],
        "rank": [row[1] for row in rows],
        "step": [row[0] for row in rows],
        "optype": [row[2] for row in rows],
        "start_ts": [row[3] for row in rows],
        "duration": [row[4] for row in rows],
        "seq_id": [0] * len(rows),
        "mc": [0] * len(rows),
        "gmc": [row[1] if "compute" in str(row[2]) else -1 for row in rows],
        "mb_id": [row[5] for row in rows],
    } | changes
    parquet.write_table(arrow.table({key: value for key, value in table.items() if value is not None}), path)
    return path


def test_a_run_or_a_url_is_reported_as_such_by_import(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(NotATraceError, match=r"is a run, which needs no import: dtprof summary /"):
        import_files([tmp_path])
    with pytest.raises(NotATraceError, match=r"s3://bucket/x is a URL. Expected files of this machine"):
        import_files([Path("s3://bucket/x")])
    with pytest.raises(NotATraceError, match=rf"^{tmp_path}/none does not exist"):
        import_files([Path(f"file://{tmp_path}/none")])


def test_a_straggler_table_gives_the_bubble_of_its_pipeline(tmp_path: Path) -> None:
    summary = imported(tmp_path, straggler_table(tmp_path / "t"))
    assert summary.steps.count == 3
    assert summary.steps.used == (2, 3)
    assert [rank.step_ns for rank in summary.ranks] == [170 * MS, 170 * MS]
    for rank, compute in ((0, 60), (1, 120)):
        parts = summary.ranks[rank].partition_ns
        assert parts is not None
        assert (parts["compute"], parts["optimizer"]) == (compute * MS, 10 * MS)
    assert summary.pipeline is not None
    # The window runs from 0 to 160 ms; busy are 60 and 120 of it: 1 - 180 / 320.
    assert summary.pipeline.bubble_fraction == pytest.approx(1 - 180 / 320, abs=1e-6)
    receive = next(row for row in summary.collectives if row.op == "recv")
    assert receive.wait_ns == 10 * MS
    assert any("odd-thing are left out" in reason for reason in summary.cannot_tell)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optype": None}, "without optype"),
        ({"start_ts": [-1.0] * 28}, "no time in seconds"),
        ({"rank": [-3] * 28}, "expected ranks"),
        ({"duration": ["x"] * 28}, "expected numbers"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DtprofError, match=said):
        import_files([straggler_table(tmp_path / "t", **changes)])


def test_every_module_that_declares_an_importer_is_listed_and_is_documented() -> None:
    folder = Path(imported_files.__file__).parent
    declaring = {
        path.stem for path in folder.glob("*.py") if re.search(r"^IMPORTER = ", path.read_text(), re.MULTILINE)
    }
    assert declaring == set(imported_files.MODULES)
    page = (folder.parents[2] / "docs/reference/imports.md").read_text(encoding="utf-8")
    formats = [import_module(f"{imported_files.__package__}.{name}").FORMAT for name in imported_files.MODULES]
    assert [name for name in formats if name not in page] == []
