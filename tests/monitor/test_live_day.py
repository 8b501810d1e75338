"""What a live page keeps of a job that runs for a day."""

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.rank_activity import RankActivities
from dtprof.records.run_follower import Growth
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables
from tests import builders
from tests.monitor.test_live_run import STEP, two_ranks

STEPS_PER_POLL = 5
POLLS_PER_HOUR = 8
"""Each of 7 minutes; the live page polls more often and finds less each time."""
HOURS = 24


def shifted(rows: Array, poll: int) -> Array:
    """Return rows as they would be so many polls later."""
    later = rows.copy()
    for name in rows.dtype.names or ():
        if name.endswith("_ns") and name not in ("wait_ns", "device_ns"):
            later[name] = np.where(rows[name] == UNKNOWN_NS, UNKNOWN_NS, rows[name] + poll * STEPS_PER_POLL * STEP)
    later["step"] += poll * STEPS_PER_POLL
    if "seq" in (rows.dtype.names or ()):
        later["seq"] += poll * STEPS_PER_POLL
    return later


def polls(first: dict[int, RankTables]) -> Iterator[dict[int, Growth]]:
    """Yield what each poll of a day finds: the same steps, later each time."""
    for poll in range(HOURS * POLLS_PER_HOUR):
        found = {}
        for rank, tables in first.items():
            operations = shifted(tables.operations, poll)
            grown = replace(
                tables,
                operations=operations,
                spans=shifted(tables.spans, poll),
                samples=shifted(tables.samples, poll),
            )
            none = operations[:0]
            found[rank] = Growth(
                tables=grown, newest_ns=grown.last_ns, open_operations=none, open_spans=grown.spans[:0], lost=0
            )
        yield found


def test_memory_does_not_grow_over_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveWindow(builders.write_run(tmp_path / "run", two_ranks(STEPS_PER_POLL)))
    first = {rank: growth.tables for rank, growth in live.poll().items()}
    day = polls(first)
    monkeypatch.setattr(live._follower, "poll", lambda: next(day))
    present = RankActivities()
    kept = []
    tracemalloc.start()
    try:
        for _ in range(HOURS):
            for _ in range(POLLS_PER_HOUR):
                present.take(live.poll(), exit_of=lambda _host, _pid: None, job_has_ended=False, boot_id="")
            summarise(live)
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        live.close()
    assert live.first_step == HOURS * POLLS_PER_HOUR * STEPS_PER_POLL - live._max_steps
    an_hour = POLLS_PER_HOUR * sum(t.operations.nbytes + t.spans.nbytes + t.samples.nbytes for t in first.values())
    assert max(kept[12:]) - max(kept[6:12]) < 3 * an_hour, kept  # in twelve hours less than what three bring
