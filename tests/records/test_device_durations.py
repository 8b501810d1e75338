"""Durations measured on the device find the operation that they belong to."""

import numpy as np

from dtprof.records import archive, device_durations, schema, tables
from dtprof.records.tables import UNKNOWN_NS

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


def test_a_duration_that_fits_no_call_is_left_out() -> None:
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
