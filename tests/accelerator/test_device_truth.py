"""What the summary says of a recorded job is what was injected into its devices, within 2 %."""

from pathlib import Path

import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run
from tests import jobs

pytestmark = [pytest.mark.jobs, pytest.mark.alone]

MS = 1_000_000


def summary_of(folder: Path, *arguments: str) -> Summary:
    """Record the job of known steps."""
    program = ("-m", "tests.accelerator.programs.known_steps", *arguments)
    jobs.recorded(folder / "run", jobs.forked(2, *program))
    return summarise(open_run(folder / "run"))


def test_parts_of_a_step_are_those_that_were_injected(tmp_path: Path) -> None:
    summary = summary_of(tmp_path)
    # Rank 0 starts the all_reduce at 50 ms and waits from 55; rank 1 starts it at 60; it ends at 75. Both compute 10 ms
    # more, and the optimizer takes 10: 95 ms a step.
    expected = (
        {"compute": 30 + 20 + 5 + 10, "exposed_wait": 5, "exposed_transfer": 15, "optimizer": 10},
        {"compute": 30 + 30 + 5 + 10, "exposed_wait": 0, "exposed_transfer": 10, "optimizer": 10},
    )
    for rank, parts in zip(summary.ranks, expected, strict=True):
        assert rank.step_ns == pytest.approx(95 * MS, rel=0.02)
        assert rank.partition_ns is not None, summary.cannot_tell
        for name, ms in parts.items():
            assert rank.partition_ns[name] == pytest.approx(ms * MS, abs=0.02 * 95 * MS), (rank.rank, name)
        assert rank.host_lead_ns is not None
        assert rank.host_lead_ns > 10 * MS  # steps are launched faster than they run
    (row,) = [row for row in summary.collectives if row.count > 2]
    assert row.wait_ns == pytest.approx((10 + 0) / 2 * MS, abs=0.3 * MS)
    assert row.transfer_ns == pytest.approx(15 * MS, rel=0.02)
    # 4,000 bytes of 2 ranks in 15 ms
    assert row.busbw_gb_per_s == pytest.approx(4000 / 15e6, rel=0.02)
    assert row.overlap == pytest.approx(1 - (20 + 10) / (25 + 15), abs=0.02)
    assert [straggler.rank for straggler in (summary.stragglers or ())] == [1]


def test_device_without_work_waits_for_the_host(tmp_path: Path) -> None:
    # 40 ms of sleep a step, the device standing; the step begins only then.
    summary = summary_of(tmp_path, "host")
    for rank in summary.ranks:
        assert rank.step_ns is not None
        assert rank.partition_ns is not None, summary.cannot_tell
        assert rank.step_ns >= (95 + 40) * MS
        computed = sum(rank.partition_ns[part] or 0 for part in ("compute", "exposed_transfer", "exposed_wait"))
        assert (rank.partition_ns["host"] or 0) >= 40 * MS
        assert computed + (rank.partition_ns["optimizer"] or 0) <= 97 * MS + 10 * MS
