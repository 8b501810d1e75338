"""What was measured on the device finds the operation that it belongs to."""

from pathlib import Path

import numpy as np

from dtprof.records import codes, schema, tables
from dtprof.records.rank_log import archive, device_durations
from dtprof.records.reader import read_rank
from dtprof.records.tables import UNKNOWN_NS
from tests.records import segments

MS = 1_000_000


def operations(*rows: tuple[int, int, int]) -> np.ndarray:
    """Return operations given as group, issue and return in ms; their completion is not known."""
    table = np.zeros(len(rows), tables.OPERATION)
    for row, (group, issued, returned) in zip(table, rows, strict=True):
        row["group"], row["issued_ns"], row["returned_ns"] = group, issued * MS, returned * MS
        row["done_ns"] = row["device_ns"] = UNKNOWN_NS
        row["state"] = schema.STATE["returned"]
    return table


def measured(*rows: tuple[int, float, int, int]) -> np.ndarray:
    """Return device times given as group, when taken, duration, until seen; in ms."""
    records = np.zeros(len(rows), archive.RECORD_DTYPE)
    for record, (group, taken, duration, seen_after) in zip(records, rows, strict=True):
        record["kind"] = schema.KIND["device_time"]
        record["group"], record["issued_ns"] = group, round(taken * MS)
        record["numel"], record["done_after"] = duration * MS, seen_after * MS
    return records


def test_a_duration_goes_to_the_call_within_which_the_back_end_took_the_operation() -> None:
    table = operations((0, 10, 12), (1, 11, 13), (0, 20, 22), (0, 30, 31))
    device_durations.join(table, measured((0, 21, 5, 90), (1, 12, 7, 90), (0, 10.5, 3, 90)))
    assert table["device_ns"].tolist() == [3 * MS, 7 * MS, 5 * MS, UNKNOWN_NS]
    assert table["done_ns"].tolist() == [100.5 * MS, 102 * MS, 111 * MS, UNKNOWN_NS]
    assert table["state"].tolist() == [schema.STATE["done"]] * 3 + [schema.STATE["returned"]]


def test_a_duration_that_fits_no_call_is_skipped() -> None:
    table = operations((0, 10, 12))
    device_durations.join(table, measured((0, 15, 5, 90), (0, 9, 5, 90), (3, 11, 5, 90)))
    assert table["device_ns"].tolist() == [UNKNOWN_NS]


def test_clocks_that_differ_by_microseconds_do_not_shift_durations_to_the_neighbour() -> None:
    table = operations((0, 10, 12), (0, 12, 14))
    device_durations.join(table, measured((0, 9.95, 1, 5), (0, 11.95, 2, 5)))
    assert table["device_ns"].tolist() == [2 * MS, UNKNOWN_NS]  # 11.95 lies within the first call
    table = operations((0, 10, 11), (0, 12, 14))
    device_durations.join(table, measured((0, 9.95, 1, 5), (0, 11.95, 2, 5)))
    assert table["device_ns"].tolist() == [1 * MS, 2 * MS]


def test_a_completion_that_was_seen_by_the_hook_is_kept() -> None:
    table = operations((0, 10, 12))
    table["done_ns"], table["state"] = 15 * MS, schema.STATE["done"]
    device_durations.join(table, measured((0, 11, 3, 90)))
    assert table["done_ns"].tolist() == [15 * MS]
    assert table["device_ns"].tolist() == [3 * MS]


P2P, EXACT = schema.DEVICE_FLAG["p2p"], schema.DEVICE_FLAG["exact"]


def test_what_a_device_did_is_read_with_the_operation_it_did_it_for(tmp_path: Path) -> None:
    returned = {"state": schema.STATE["returned"], "group": 1}
    collective = {**returned, "kind": schema.KIND["collective"], "issued_ns": 10 * MS}
    message = {**returned, "kind": schema.KIND["p2p"], "issued_ns": 11 * MS}
    started = {"state": schema.STATE["issued"], "group": 1, "tag": 700, "thread": 2}
    ended = {**started, "state": schema.STATE["done"], "done_after": 3 * MS}
    rows = [
        segments.record(**collective, seq=4),
        segments.record(**message, seq=4),
        # the message runs from 20 to 23 ms; its stream waits for it from 21 to 24; the host was there 12 to 12.5 ms
        segments.record(
            **ended, kind=codes.DEVICE_OPERATION, seq=4, issued_ns=20 * MS, numel=11 * MS, flags=P2P | EXACT
        ),
        segments.record(
            **ended, kind=codes.DEVICE_WAIT, seq=4, issued_ns=21 * MS, numel=12 * MS, flags=P2P, returned_after=MS / 2
        ),
        segments.record(**started, kind=codes.DEVICE_OPERATION, seq=4, issued_ns=25 * MS, numel=10 * MS),
        segments.record(**started, kind=codes.DEVICE_PHASE, issued_ns=1 * MS, numel=0),
    ]
    segment = segments.write_rank(tmp_path, rows)
    segments.fill_up(segment)
    found = read_rank(segment.parent, rank=0, attempt=0)
    intervals = found.device_intervals
    assert intervals["row"].tolist() == [-1, 1, 1, 0]
    assert intervals["begin_ns"].tolist() == [1 * MS, 20 * MS, 21 * MS, 25 * MS]
    assert intervals["end_ns"].tolist() == [UNKNOWN_NS, 23 * MS, 24 * MS, UNKNOWN_NS]
    assert intervals["host_end_ns"].tolist() == [UNKNOWN_NS, UNKNOWN_NS, 12.5 * MS, UNKNOWN_NS]
    assert set(intervals["error_ns"].tolist()) == {700}
    assert found.operations["device_ns"].tolist() == [UNKNOWN_NS, 3 * MS]
    assert found.operations["done_ns"].tolist() == [UNKNOWN_NS, UNKNOWN_NS]  # of the host's own eye nothing is known
    assert found.last_ns == 25 * MS
