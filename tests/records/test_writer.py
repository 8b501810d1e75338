"""The files of a run that are not written by a hook."""

import json
import multiprocessing
import os
import socket
import time
from pathlib import Path

import pytest

from dtprof.records import paths, schema, writer
from dtprof.records.reader import open_run


def test_header_says_who_writes_and_when() -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    data = writer.segment_header(
        rank=3,
        local_rank=1,
        world_size=4,
        attempt=2,
        hook=2,
        torch_version="2.13.0+cpu",
        dtprof_version="0.1.0",
    )
    header = dict(zip(schema.HEADER_OFFSET, schema.HEADER_STRUCT.unpack(data), strict=True))
    assert len(data) <= schema.HEADER_SIZE
    expected = {
        "magic": schema.MAGIC,
        "format_version": schema.FORMAT_VERSION,
        "record_size": 64,
        "capacity": schema.SEGMENT_CAPACITY,
        "segment": 0,
        "rank": 3,
        "local_rank": 1,
        "world_size": 4,
        "attempt": 2,
        "pid": os.getpid(),
        "tap": 2,
        "head": 0,
        "dropped": 0,
        "marks": 0,
    }
    assert {name: header[name] for name in expected} == expected
    assert before <= header["opened_monotonic_ns"] <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert abs(header["opened_realtime_ns"] - time.time_ns()) < 60e9
    assert header["host"].rstrip(b"\0") == socket.gethostname().encode()[:63]
    assert header["boot_id"].rstrip(b"\0") == writer.boot_id().encode()[:39]


def test_header_is_read_back_by_the_reader(tmp_path: Path) -> None:
    folder, attempt = writer.claim_rank_folder(tmp_path, 3, 0)
    data = writer.segment_header(
        rank=3, local_rank=1, world_size=4, attempt=attempt, hook=1, torch_version="2.13.0", dtprof_version="0.1.0"
    )
    (folder / paths.segment_name(0)).write_bytes(data.ljust(schema.SEGMENT_SIZE, b"\0"))
    (folder / paths.STRINGS).touch()
    tables = open_run(tmp_path).load(3)
    assert (tables.rank, tables.local_rank, tables.world_size, tables.pid) == (3, 1, 4, os.getpid())
    assert (tables.hook, tables.torch_version, tables.host) == ("native", "2.13.0", socket.gethostname()[:63])
    assert (tables.num_events, tables.closed, tables.truncated, tables.problems) == (0, False, False, ())


def test_names_too_long_for_the_header_are_cut_and_do_not_spill_over() -> None:
    long = "9" * 500
    data = writer.segment_header(
        rank=0, local_rank=0, world_size=1, attempt=0, hook=1, torch_version=long, dtprof_version=long
    )
    assert len(data) == schema.HEADER_STRUCT.size


def test_folder_of_a_restarted_rank_takes_the_next_attempt(tmp_path: Path) -> None:
    claimed = [writer.claim_rank_folder(tmp_path, 1, first) for first in (0, 0, 5, 0)]
    assert [attempt for _, attempt in claimed] == [0, 1, 5, 2]
    assert [folder.name for folder, _ in claimed] == ["rank-00001.0", "rank-00001.1", "rank-00001.5", "rank-00001.2"]


def test_claiming_in_a_missing_run_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        writer.claim_rank_folder(tmp_path / "gone", 0, 0)


def append_many(path: Path, who: int) -> None:
    for i in range(500):
        writer.append_line(path, {"who": who, "i": i, "text": "x" * 300})


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=append_many, args=(path, who)) for who in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
        assert process.exitcode == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for who in range(3):
        assert [row["i"] for row in rows if row["who"] == who] == list(range(500))


def test_json_file_is_replaced_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    writer.write_json(file, {"a": Path("/x"), "b": [1]})
    writer.write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_boot_id_is_stable_and_known_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert writer.boot_id() == writer.boot_id()
    monkeypatch.setattr(writer, "BOOT_ID_FILE", Path("/nowhere"))
    assert writer.boot_id() == f"unknown-{socket.gethostname()}"
