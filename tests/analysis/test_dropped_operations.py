"""Operations of which only sums are left are counted."""

from dataclasses import replace

import numpy as np

from dtprof.analysis.run_summary import summarise
from dtprof.records import codes
from dtprof.records.tables import DROPPED, RankTables
from tests.builders import MemoryRun, RankBuilder


def tables_of(number: int, num_kept: int, num_dropped: int) -> RankTables:
    """Return a rank that made operations of 100 bytes up to the sixth and dropped the records of the first."""
    rank = RankBuilder(number, world_size=2)
    for seq in range(6 - num_kept, 6):
        rank.op("all_reduce", 100 * seq, 100 * seq + 50, nbytes=100, seq=seq, api="all_reduce")
    dropped = np.zeros(1, DROPPED)
    dropped["kind"], dropped["events"], dropped["nbytes"] = codes.COLLECTIVE, num_dropped, 300 * num_dropped
    dropped["site"] = rank.site("all_reduce")
    return replace(rank.tables(), dropped=dropped[: int(num_dropped > 0)], dropped_events=num_dropped)


def test_dropped_records_are_in_counts_and_bytes_whichever_rank_dropped_more() -> None:
    # Rank 0 keeps 3 and drops 3, rank 1 keeps 4 and drops 2: 6 operations, 7 records of 100 bytes, 5 of 300.
    summary = summarise(MemoryRun([tables_of(0, 3, 3), tables_of(1, 4, 2)]))
    (row,) = summary.collectives
    assert (row.count, row.dropped_records, row.duration_ns) == (6, 5, 50)
    assert row.bytes == (7 * 100 + 5 * 300) // 12
    assert any("of 5 records only sums are left" in caveat for caveat in summary.cannot_tell)


def test_without_dropped_records_nothing_is_said_of_them() -> None:
    summary = summarise(MemoryRun([tables_of(0, 4, 0), tables_of(1, 4, 0)]))
    (row,) = summary.collectives
    assert (row.count, row.dropped_records, row.bytes) == (4, 0, 100)
    assert not any("only sums" in caveat for caveat in summary.cannot_tell)
