"""Sums of events whose records are dropped, by operation and group."""

import numpy as np

from dtprof.records import schema
from dtprof.records.rank_log.archive import RECORD_DTYPE

KEY = ("kind", "op", "group", "dtype", "site")
SUMS = ("events", "failed", "numel", "waited_ns", "took_ns")
"""Samples: `numel` is the largest value. `took_ns` counts events that were seen to complete."""


def add(totals: dict[tuple[int, int, int, int, int], tuple[int, int, int, int, int]], segment: bytes) -> None:
    """Add the events of a segment file to the sums."""
    body = segment[schema.HEADER_SIZE :]
    records = np.frombuffer(body[: len(body) // schema.RECORD_SIZE * schema.RECORD_SIZE], RECORD_DTYPE)
    records = records[records["state"] != schema.STATE["empty"]]
    operation = np.isin(records["kind"], [schema.KIND["collective"], schema.KIND["p2p"]])
    columns = [records[name].astype(np.int64) for name in KEY]
    columns[2] = np.where(operation, columns[2], 0)
    keys, where = np.unique(np.stack(columns), axis=1, return_inverse=True)
    where = where.reshape(-1)
    done = records["state"] >= schema.STATE["done"]
    sums = {
        "events": np.ones(len(records)),
        "failed": records["state"] == schema.STATE["failed"],
        "numel": records["numel"].astype(np.float64),
        "waited_ns": records["waited_for"].astype(np.float64),
        "took_ns": np.where(done, records["done_after"], 0).astype(np.float64),
    }
    added = [np.bincount(where, np.asarray(sums[name], np.float64), keys.shape[1]).astype(np.int64) for name in SUMS]
    for i in range(keys.shape[1]):
        kind, op, group, dtype, site = (int(value) for value in keys[:, i])
        key = (kind, op, group, dtype, site)
        events, failed, numel, waited, took = (int(column[i]) for column in added)
        old = totals.get(key, (0, 0, 0, 0, 0))
        if kind == schema.KIND["sample"]:
            numel = max(old[2], int(records["numel"][where == i].max())) - old[2]
        totals[key] = (old[0] + events, old[1] + failed, old[2] + numel, old[3] + waited, old[4] + took)
