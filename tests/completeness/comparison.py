"""Compare the operations of a run with gloo's own counts of them."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.records import schema
from dtprof.records.tables import Array, Group, RankTables
from tests.completeness.programs.names import WHOLE

BELOW_THE_HOOK = {"Backend.allreduce": 1}
"""Calls that dtprof does not see, and how many operations gloo counts in them."""

GLOO_COUNTS_OTHERWISE = {
    "reduce_scatter_": "gloo carries out the list form as one reduction for each rank, and counts these",
    "reduce_scatter_tensor_coalesced_": "gloo counts each of the tensors that are coalesced",
    "monitored_barrier_": "gloo counts the sends and receives that it makes of it, two for each rank that rank 0 hears",
}
"""Operators whose calls gloo does not count as one each, and why."""


def counts_of_gloo(op: str, group: Group, group_rank: int, tensors: int) -> int:
    """Return how many operations gloo counts for one call."""
    if op == "reduce_scatter_":
        return group.size
    if op == "reduce_scatter_tensor_coalesced_":
        return tensors
    if op == "monitored_barrier_":
        return 2 * (group.size - 1) if group_rank == 0 else 2
    return 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One call or scenario on one rank."""

    section: str
    name: str
    from_ns: int
    to_ns: int
    gloo: dict[str, int]
    error: str = ""
    refused: str | None = None
    tensors: int = 1

    def rows(self, tables: RankTables) -> Array:
        """Return the operations that were issued in it."""
        issued = tables.operations["issued_ns"]
        return tables.operations[(issued >= self.from_ns) & (issued <= self.to_ns)]

    def operators(self, tables: RankTables) -> Counter[str]:
        """Return how often each operator was recorded in it."""
        return Counter(tables.raw_ops[row["op"]] for row in self.rows(tables))


def read_oracle(folder: Path, rank: int) -> tuple[list[Measurement], Measurement]:
    """Return the measurements of a rank, and that of its whole process."""
    entries = json.loads((folder / f"oracle-{rank}.json").read_text())
    *measurements, whole = [Measurement(**entry) for entry in entries]
    assert whole.name == WHOLE
    return measurements, whole


def expected_counts(tables: RankTables, rows: Array, tensors: int, *, failed: bool) -> dict[str, int]:
    """Return what gloo should have counted for these operations, by name of the group, failed ones or the others."""
    counts: Counter[str] = Counter()
    for row in rows[(rows["state"] == schema.STATE["failed"]) == failed]:
        group = tables.groups[int(row["group"])]
        group_rank = group.ranks.index(tables.rank) if group.ranks else tables.rank
        counts[group.name] += counts_of_gloo(tables.raw_ops[row["op"]], group, group_rank, tensors)
    return dict(counts)


def differences(tables: RankTables, measurements: list[Measurement], whole: Measurement) -> list[dict[str, Any]]:
    """Return where the run and gloo disagree; a call that torch refuses may be counted by gloo or not."""
    found = []
    outside = np.ones(len(tables.operations), bool)
    gloo_outside = Counter(whole.gloo)
    for measurement in measurements:
        issued = tables.operations["issued_ns"]
        outside &= (issued < measurement.from_ns) | (issued > measurement.to_ns)
        gloo_outside.subtract(measurement.gloo)
        rows = measurement.rows(tables)
        least = Counter(expected_counts(tables, rows, measurement.tensors, failed=False))
        failed = Counter(expected_counts(tables, rows, measurement.tensors, failed=True))
        least["0"] += BELOW_THE_HOOK.get(measurement.name, 0)
        gloo = Counter(measurement.gloo)
        counted = least <= gloo <= least + failed
        told = (
            measurement.refused in measurement.error
            if measurement.refused is not None
            else measurement.error == "" and not failed
        )
        if not (counted and told):
            found.append({"rank": tables.rank, "recorded": least, "failed": failed, "measured": measurement})
    rest = expected_counts(tables, tables.operations[outside], 1, failed=False)
    if rest != {group: count for group, count in gloo_outside.items() if count}:
        found.append({"rank": tables.rank, "recorded": rest, "outside of all, by gloo": gloo_outside})
    return found
