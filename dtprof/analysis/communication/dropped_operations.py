"""Operations whose records were dropped to keep a log within its limit: their sums, by the rows of the collectives."""

import numpy as np

from dtprof.analysis.communication.collective_table import ROW_SUMS, RowKey, add_sums
from dtprof.job.api_names import name_site
from dtprof.job.groups import identify_groups
from dtprof.job.valid_records import UNNAMED
from dtprof.records import codes
from dtprof.records.tables import Array, RankTables


def sum_dropped(tables: RankTables) -> dict[RowKey, Array]:
    """Return the sums of the dropped operations of one rank, without times."""
    if not len(tables.dropped):
        return {}
    groups = identify_groups(tables.groups)
    sums: dict[RowKey, Array] = {}
    for row in tables.dropped[np.isin(tables.dropped["kind"], (codes.COLLECTIVE, codes.POINT_TO_POINT))]:
        group = groups.get(int(row["group"]))
        if group is None or row["events"] <= 0:
            continue
        op = tables.ops[row["op"]] if row["op"] < len(tables.ops) else UNNAMED
        row_sums = np.zeros(1, ROW_SUMS)
        row_sums["records"] = row_sums["dropped"] = row["events"]
        row_sums["nbytes"], row_sums["sized"] = row["nbytes"], row["events"] * (row["dtype"] != codes.NONE)
        if row["kind"] == codes.POINT_TO_POINT:
            row_sums["count"] = row_sums["of_lowest"] = row["events"]
        elif tables.rank == group.ranks.lowest:
            row_sums["of_lowest"] = row["events"]
        key = RowKey(group, op, name_site(tables, int(row["site"]), op))
        sums[key] = add_sums(sums[key], row_sums) if key in sums else row_sums
    return sums
