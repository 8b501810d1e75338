"""Archived segments give back every byte."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.records import schema, writer
from dtprof.records.rank_log import archive

HEADER = writer.segment_header(
    rank=3, local_rank=1, world_size=4, attempt=0, hook=1, torch_version="2.13.0", dtprof_version="1"
).ljust(schema.HEADER_SIZE, b"\0")


def realistic(count: int) -> np.ndarray:
    """Return records of a training loop: 16 operations a step on two groups, noisy times."""
    noise = np.random.default_rng(1)
    records = np.zeros(count, archive.RECORD_DTYPE)
    i = np.arange(count)
    records["state"] = schema.STATE["done"]
    records["kind"] = np.where(i % 16 == 15, schema.KIND["span"], schema.KIND["collective"])
    records["op"] = i % 16 % 3
    records["group"] = i % 2
    records["seq"] = i // 2
    records["peer"] = -1
    records["site"] = 1 + i % 16
    records["step"] = i // 16
    records["numel"] = 1000 * (i % 16)
    records["waits"] = i % 4 == 0
    records["issued_ns"] = 10**15 + np.cumsum(noise.integers(20_000, 900_000, count))
    for name, scale in (("returned_after", 20_000), ("waited_for", 100_000)):
        records[name] = noise.integers(1, scale, count)
    records["waited_for"] *= records["waits"]
    records["waited_from"] = (records["returned_after"] + 1000) * records["waits"]
    records["done_after"] = records["waited_from"] + records["waited_for"] + noise.integers(1, 99_999, count)
    return records


def segment(records: np.ndarray) -> bytes:
    return HEADER + records.tobytes()


def test_a_realistic_segment_takes_at_most_twelve_bytes_an_event() -> None:
    data = segment(realistic(schema.SEGMENT_CAPACITY))
    packed = archive.pack(data)
    assert archive.unpack(packed) == data
    assert len(packed) / schema.SEGMENT_CAPACITY <= 12


@given(st.binary(max_size=40 * schema.RECORD_SIZE))
def test_any_bytes_come_back(body: bytes) -> None:
    whole = len(body) // schema.RECORD_SIZE * schema.RECORD_SIZE
    assert archive.unpack(archive.pack(HEADER + body)) == HEADER + body[:whole]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**32 - 1)), max_size=30))
def test_any_order_of_groups_and_positions_comes_back(rows: list[tuple[int, int, int]]) -> None:
    records = np.zeros(len(rows), archive.RECORD_DTYPE)
    for record, (group, kind, seq) in zip(records, rows, strict=True):
        record["group"], record["kind"], record["seq"] = group, kind, seq
    assert archive.unpack(archive.pack(segment(records))) == segment(records)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 0.5, -1.0, 3e38])
def test_times_that_no_hook_writes_come_back(special: float) -> None:
    records = realistic(20)
    records["done_after"][7] = special
    assert archive.unpack(archive.pack(segment(records))) == segment(records)


def test_an_archive_cut_anywhere_is_refused_with_a_sentence() -> None:
    packed = archive.pack(segment(realistic(50)))
    for length in range(0, len(packed), 7):
        with pytest.raises(ValueError, match="cut"):
            archive.unpack(packed[:length])


def test_what_is_no_segment_is_not_packed() -> None:
    with pytest.raises(ValueError, match="a segment of 3 bytes"):
        archive.pack(b"abc")


def test_a_file_is_replaced_by_its_archive(tmp_path: Path) -> None:
    file = tmp_path / "events.00004"
    data = segment(realistic(100))
    file.write_bytes(data)
    archive.archive_segment(file)
    assert [path.name for path in tmp_path.iterdir()] == ["events.00004.z"]
    assert archive.unpack((tmp_path / "events.00004.z").read_bytes()) == data
