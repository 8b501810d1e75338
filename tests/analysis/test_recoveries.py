"""Time lost to restarts of the job or of a replica."""

from pathlib import Path

from dtprof.analysis.results import Recovery
from dtprof.analysis.run_summary import summarise
from dtprof.records import events
from dtprof.records.reader import open_run
from dtprof.report.text.summary_text import summary_text
from tests.builders import RankBuilder, write_run

MS = 1_000_000


def attempt(rank: int, number: int, later_s: int, steps: int = 3) -> RankBuilder:
    """Build an attempt with steps of 100 ms, the first of which ends at 100 ms."""
    builder = RankBuilder(rank, world_size=2, attempt=number, started_later_s=later_s, closed=number > 0)
    for end in range(100, 100 * steps + 1, 100):
        builder.span(events.BACKWARD, (end - 60) * MS, (end - 20) * MS)
        builder.span(events.OPTIMIZER, (end - 10) * MS, end * MS)
    return builder


def test_restart_loses_the_time_from_the_last_record_to_the_end_of_the_first_step(tmp_path: Path) -> None:
    # The first attempt ends at 0.3 s; the second one's clock begins 5 s later, its first step ends at 5.1 s: 4.8 s.
    write_run(tmp_path, [attempt(rank, number, 5 * number) for number in (0, 1) for rank in (0, 1)])
    summary = summarise(open_run(tmp_path))
    assert summary.recoveries == (Recovery(replica=None, ranks=(0, 1), lost_ns=4800 * MS),)
    assert "the job restarted 1 time: 4.80 s from the last record before to the first step after" in " ".join(
        summary_text(summary).split()
    )


def test_time_of_a_restart_without_a_step_after_it_is_not_known(tmp_path: Path) -> None:
    write_run(tmp_path, [attempt(0, 0, 0), attempt(1, 0, 0), attempt(0, 1, 5), attempt(1, 1, 5, steps=1)])
    assert [recovery.lost_ns for recovery in summarise(open_run(tmp_path)).recoveries] == [None]


def test_program_after_one_that_finished_is_no_restart_of_it(tmp_path: Path) -> None:
    programs = [attempt(rank, number, 5 * number) for number in (0, 1) for rank in (0, 1)]
    for program in programs:
        program.closed = True
    write_run(tmp_path, programs)
    summary = summarise(open_run(tmp_path))
    assert summary.recoveries == ()
    assert [text for text in summary.cannot_tell if text.startswith("run:")] == [
        "run: several programs ran one after the other under the same ranks; only the last is shown"
    ]


def test_job_without_a_restart_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, [attempt(0, 0, 0), attempt(1, 0, 0)])
    summary = summarise(open_run(tmp_path))
    assert (summary.recoveries, summary.replicas) == ((), 1)
    assert "restarted" not in summary_text(summary)
