"""A running job under watch: the activity of its ranks, the summary of its newest steps, and its verdict."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtprof.analysis.rank_exits import RankEnd
from dtprof.analysis.results import StragglerResult, Summary
from dtprof.analysis.whatif.advice import summarise_advised
from dtprof.columns import distinct
from dtprof.diagnosis.reported_mismatches import ReportedMismatch, list_reported
from dtprof.formatting import format_age, format_count, format_ns, list_ranks, plural
from dtprof.job.stalls import (
    INTERVAL_NS,
    JobProgress,
    Pauses,
    Progress,
    RankProgress,
    assess_job,
    hang_after_of,
)
from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.polling_interval import PollingInterval
from dtprof.monitor.rank_activity import RankActivities, RankActivity
from dtprof.monitor.step_aggregates import StepAggregates
from dtprof.records import writer
from dtprof.records.nodes.node_reader import silent_hosts
from dtprof.records.run_follower import Growth

MAX_MISMATCH_ALARMS = 2
"""Mismatches that are alarms of their own: the first is the cause of most that follow."""
MAX_NAMED = 8
"""Ranks that are named where they are all that are left."""
SUMMARY_EVERY_S = 1.0
SUMMARY_SHARE = 0.01
"""Of the time, that the summary may take."""
ADVICE_EVERY_S = 15.0
ADVICE_SHARE = 0.005
ADVISED_STEPS = 24
"""Newest steps that advice is taken from."""
MAX_ADVISED = 128
"""Ranks; of more a few steps take too long to replay beside a job."""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """The result of one poll."""

    ranks: Sequence[RankActivity]
    summary: Summary | None  # of the newest steps; None before the first
    has_moved: bool  # a rank has left a record since the poll before
    progress: JobProgress  # of the ranks that run
    mismatches: Sequence[ReportedMismatch]  # what the launcher has reported
    has_ended: bool
    exit_status: int | None
    job_problem: str  # why it is not known whether the job goes on; empty where that is known
    alarms: Sequence[str]  # the worst first

    @property
    def is_stalled(self) -> bool:
        """Say whether no rank has made progress for the stall threshold."""
        return self.progress.state == Progress.STALLED

    @property
    def goes_well(self) -> bool:
        """Say whether all ranks run and make progress, and no mismatch has been reported."""
        return (
            self.progress.state == Progress.PROGRESSING
            and not self.mismatches
            and all(rank.end.is_running for rank in self.ranks)
        )

    @property
    def step(self) -> int:
        """Steps that all running ranks had ended."""
        running = [rank.step for rank in self.ranks if rank.end.is_running] or [rank.step for rank in self.ranks]
        return min(running, default=0)


class Monitor:
    """Polls a run time and again; takes a bounded share of the time and of memory."""

    def __init__(self, run: Path, *, summarises: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the run.

        Parameters:
            run: the run directory.
            summarises: summarise the newest steps; otherwise the caller sets `summary`.
            clock: seconds.

        Raises:
            NotARunError: there is none.
            NewerFormatError: it was written by a newer dtprof.
        """
        self.window = LiveWindow(run)
        self._summarises = summarises
        self._aggregates = StepAggregates()
        self._activities = RankActivities()
        self._clock = clock
        self._boot_id = writer.boot_id()
        self._moved = clock()
        self._pauses: dict[str, Pauses] = {}  # by boot id: hosts have clocks of their own
        self.summary: Summary | None = None
        self._summary_interval = PollingInterval(every_s=SUMMARY_EVERY_S, share=SUMMARY_SHARE, clock=clock)
        self._advice_interval = PollingInterval(every_s=ADVICE_EVERY_S, share=ADVICE_SHARE, clock=clock)
        self._has_news = True

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.window.path

    @property
    def num_ranks(self) -> int:
        """Ranks that had a log when the run was opened or last changed."""
        return self.window.num_ranks

    def poll(self, *, summarises: bool = True) -> JobSnapshot:
        """Poll once.

        Parameters:
            summarises: summarise where that is due; with many ranks it takes longest.

        Raises:
            NotARunError: the run has been moved or deleted.
        """
        growths = self.window.poll()
        manifest = self.window.manifest
        has_ended = bool(manifest.ended_realtime_ns)
        mismatches = list_reported(self.window.mismatches, None, started_ns=manifest.started_realtime_ns)
        has_moved = any(growth.newest_ns or growth.tables.num_events for growth in growths.values())
        if has_moved:
            self._moved, self._has_news = self._clock(), True
        ranks = self._activities.take(
            growths, exit_of=self.window.exit_of, job_has_ended=has_ended, boot_id=self._boot_id
        )
        if growths and self._summarises and summarises:
            self._summarise()
        is_over = has_ended or not any(rank.end.is_running for rank in ranks)
        self._note_pauses(growths.values())
        running = [] if is_over else [rank for rank in ranks if rank.end.is_running]
        progress = assess_job(
            _progress(running, self._clock() - self._moved),
            hang_after_s=hang_after_of(manifest.settings),
            usual_pause_s=min((pauses.usual_s for pauses in self._pauses.values()), default=0.0),
        )
        return JobSnapshot(
            ranks=ranks,
            summary=self.summary,
            has_moved=has_moved,
            progress=progress,
            has_ended=has_ended,
            exit_status=manifest.exit_status,
            job_problem=self.window.job_problem,
            mismatches=mismatches,
            alarms=(
                *([describe_damage(self.window.job_problem)] if self.window.job_problem else []),
                *self._find_silent(ranks, is_over=is_over),
                *_find_alarms(ranks, self.summary, growths, mismatches, progress, is_over=is_over),
            ),
        )

    def close(self) -> None:
        """Close the files."""
        self.window.close()

    def _find_silent(self, ranks: Sequence[RankActivity], *, is_over: bool) -> list[str]:
        """Name the hosts of which nothing is heard any more."""
        running = {rank.host for rank in ranks if rank.end.is_running}
        if is_over or len(running) < 2:
            return []
        quiet_s = silent_hosts(self.run, {rank.host for rank in ranks}, running)
        return [
            f"host {host} is silent: nothing was heard of it for {format_age(seconds)} while others were"
            for host, seconds in sorted(quiet_s.items())
        ]

    def _note_pauses(self, growths: Iterable[Growth]) -> None:
        """Take in when ranks began something."""
        started: dict[str, set[int]] = {}
        for growth in growths:
            known = growth.tables
            parts = (
                (known.operations, "issued_ns"),
                (growth.open_operations, "issued_ns"),
                (known.spans, "begin_ns"),
                (growth.open_spans, "begin_ns"),
            )
            for rows, column in parts:
                started.setdefault(known.boot_id, set()).update(distinct(rows[column] // INTERVAL_NS).tolist())
        for boot, intervals in started.items():
            self._pauses.setdefault(boot, Pauses()).add(sorted(intervals))

    def _summarise(self) -> None:
        """Summarise the newest steps where that is due and would say something new."""
        if not self._has_news or not self._summary_interval.is_due:
            return
        began = self._clock()
        self._has_news = False
        advice = self.summary.advice if self.summary is not None else None
        self.summary = replace(self._aggregates.take(self.window.frozen()).summary, advice=advice)
        self._summary_interval.charge(self._clock() - began)
        if self._advice_interval.is_due and self.num_ranks <= MAX_ADVISED:
            self._advise(self.summary)

    def _advise(self, summary: Summary) -> None:
        """Predict the best change from the newest steps."""
        began = self._clock()
        newest = summary.steps.used[1] if summary.steps.used is not None else 0
        if newest <= 0:
            return
        records = self.window.frozen(first=max(0, newest - ADVISED_STEPS))
        self.summary = replace(summary, advice=summarise_advised(records).advice)
        self._advice_interval.charge(self._clock() - began)


def describe_damage(job_problem: str) -> str:
    """Name the fault of the run.json of a run, and the remedy."""
    return (
        f"{job_problem}; expected the JSON object that `dtprof run` writes: put it back, or go by what the ranks "
        "recorded"
    )


def _progress(running: Sequence[RankActivity], watched_s: float) -> dict[int, RankProgress]:
    """Return the progress of ranks; on unknown clocks, how long no rank has left a record."""
    is_known = all(rank.quiet_ns is not None for rank in running)
    return {
        rank.rank: RankProgress(
            quiet_s=rank.quiet_ns / 1e9 if is_known and rank.quiet_ns is not None else watched_s,
            phase=rank.phase,
            waits=rank.blocks or rank.joins,
        )
        for rank in running
    }


def _find_alarms(
    ranks: Sequence[RankActivity],
    summary: Summary | None,
    growths: Mapping[int, Growth],
    mismatches: Sequence[ReportedMismatch],
    progress: JobProgress,
    *,
    is_over: bool,
) -> list[str]:
    alarms = _describe_exits(ranks)
    if progress.state == Progress.STALLED:
        alarms.append(progress.words)
    alarms += map(_mismatch, mismatches[:MAX_MISMATCH_ALARMS])
    if len(mismatches) > MAX_MISMATCH_ALARMS:
        alarms.append(plural(len(mismatches) - MAX_MISMATCH_ALARMS, "more mismatch"))
    stopped = [rank for rank, growth in growths.items() if growth.tables.truncated]
    if stopped:
        alarms.append(f"recording stopped on {list_ranks(stopped)}: the disk is full, or --max-log-mb is too small")
    if summary is not None:
        alarms += [_slow(found, is_over=is_over) for found in (summary.stragglers or ())[:2]]
    return alarms


def _describe_exits(ranks: Sequence[RankActivity]) -> list[str]:
    """Name the ranks that failed, the fewest of a kind first; those ended by the launcher's SIGTERM come last."""
    by_end: dict[RankEnd, list[int]] = {}
    for rank in ranks:
        if rank.end.failed:
            by_end.setdefault(rank.end, []).append(rank.rank)
    alarms: list[str] = []
    left = len(ranks)
    for end, found in sorted(by_end.items(), key=lambda item: (item[0].was_stopped, len(item[1]))):
        named = list_ranks(found)
        if len(found) == left > (MAX_NAMED if alarms else 1):
            every = "both ranks" if left == 2 else f"all {format_count(left)} ranks"
            named = f"the other {format_count(left)} ranks" if alarms else every
        left -= len(found)
        if end.was_stopped:
            was = "was" if len(found) == 1 else "were"
            alarms.append(f"{'then ' if alarms else ''}{named} {was} stopped by SIGTERM")
        else:
            alarms.append(f"{named} {end.clause(len(found))}")
    return alarms


def _mismatch(mismatch: ReportedMismatch) -> str:
    when = f" {mismatch.after_s:.0f} s after the start" if mismatch.after_s is not None else ""
    return f"mismatch{when}: {mismatch.summary}"


def _slow(found: StragglerResult, *, is_over: bool) -> str:
    where = f" {found.phase_words}" if found.phase else ""
    blame = found.blame_ns_per_step
    cost = f": costs the others {format_ns(blame)} a step" if blame else ""
    return f"rank {found.rank} {'was' if is_over else 'is'} slow{where}{cost}"
