"""The live pages of one run: documents by panel, each with the version at which it last changed."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dtprof.analysis.memory.device_series import follow_devices, samples_each
from dtprof.analysis.results import Summary
from dtprof.analysis.timeline.run_closeup import Closeup, examine
from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.reported_mismatches import list_reported
from dtprof.errors import DtprofError, NotARunError
from dtprof.formatting import format_age, format_count
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.job.stalls import Progress
from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.polling_interval import PollingInterval
from dtprof.monitor.run_monitor import JobSnapshot, Monitor
from dtprof.monitor.step_aggregates import NewestStep, StepAggregates
from dtprof.monitor.web.now_table import render_now
from dtprof.records.reader import Run, open_run
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import Dashboard
from dtprof.report.pages.page_panels import Document, render_page

POLL_EVERY_S, POLL_SHARE = 0.5, 0.003
"""How often a request reads the new records, and the share of the time that may take."""
REFRESH_EVERY_S, REFRESH_SHARE = 4.4, 0.015
"""How often the figures of the open page are redrawn, and the share of the time that may take."""
DETAIL_EVERY_S, DETAIL_SHARE = 30.0, 0.0015
"""The same for figures of single operations: timelines, schedules, the critical path, traffic, memory."""
TURN_SHARE = 0.1
"""Share of the time for drawing while the state of the job keeps changing: ranks exit, stall or report mismatches."""
TURN_EVERY_S = 1.0
DIAGNOSE_SHARE = 0.007
"""Share of the time for the verdict while the state of the job does not change."""
DIAGNOSE_EVERY_S = 7.5
AT_ONCE_S = 0.6
"""How long an answer waits for work that has just been started, so that quick work is part of the same answer."""
WATCHED_S = 5.0
"""How long after the last request a page is still drawn ahead of the next one."""
MAX_NODE_SAMPLES = 100
"""Samples of one node from which its devices are drawn."""

Pages = Callable[[Source], Sequence[Dashboard]]
Result = TypeVar("Result")


class DiagnoseRun(Protocol):
    """Returns the verdict of a run."""

    def __call__(self, run: Path, summary: Summary | None, /, *, goes_well: bool) -> Verdict:
        """Diagnose the run.

        Parameters:
            summary: of the newest steps of a job that runs; None where it has ended.
            goes_well: all ranks run and make progress, as far as the pages know.
        """


class Begin(Protocol):
    """Starts work, and returns the future of its result."""

    def __call__(self, work: Callable[[], Result], /) -> Future[Result]:
        """Start the work."""


@dataclass(frozen=True, kw_only=True)
class _Shown:
    version: int
    digest: bytes
    document: Document


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """The new state of the pages, with the documents of the watched ones."""

    source: Source
    pages: Sequence[Dashboard]
    documents: Mapping[str, Mapping[str, Document]]  # by page that is drawn already, by anchor
    newest: NewestStep | None
    has_details: bool
    verdict: Verdict | None  # None: the drawing included no diagnosis
    taken_s: float  # processor time, without that for the verdict
    diagnosed_s: float


@dataclass(frozen=True, kw_only=True)
class _Diagnosed:
    """A verdict between two drawings."""

    verdict: Verdict
    taken_s: float  # processor time


@dataclass(frozen=True, kw_only=True)
class _AsOf:
    """The step and time at which the records were read."""

    step: int
    at: float


class Feed:
    """Polls a run on request, and draws changed panels; several threads may request.

    The result of a poll is in the answer at once. Drawing and diagnosis run beside the answers. Watched pages are drawn
    ahead, other pages on request.
    """

    def __init__(
        self,
        run: Path,
        *,
        pages: Pages,
        diagnose: DiagnoseRun,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
        begin: Begin | None = None,
    ) -> None:
        """Open the run.

        Parameters:
            run: the run directory.
            pages: which pages to show of what there is.
            diagnose: says what is wrong with a run.
            clock: seconds.
            cpu: processor time of the calling thread, seconds.
            begin: starts work beside the answers; None: in threads.

        Raises:
            NotARunError: there is none.
            NewerFormatError: it was written by a newer dtprof.
        """
        self._monitor = Monitor(run, summarises=False, clock=clock)
        self._make_pages, self._diagnose = pages, diagnose
        self._clock, self._cpu = clock, cpu
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="dtprof-feed")
        self._begin: Begin = begin or self._threads.submit
        self._aggregates = StepAggregates()
        self._refresh_interval = PollingInterval(every_s=REFRESH_EVERY_S, share=REFRESH_SHARE, clock=clock)
        self._detail_interval = PollingInterval(every_s=DETAIL_EVERY_S, share=DETAIL_SHARE, clock=clock)
        self._turn_interval = PollingInterval(every_s=TURN_EVERY_S, share=TURN_SHARE, clock=clock)
        self._diagnose_interval = PollingInterval(every_s=DIAGNOSE_EVERY_S, share=DIAGNOSE_SHARE, clock=clock)
        self._polled = float("-inf")
        self._poll_interval = PollingInterval(every_s=POLL_EVERY_S, share=POLL_SHARE, clock=clock)
        self._snapshot: JobSnapshot | None = None
        self._verdict: Verdict | None = None
        self._newest: NewestStep | None = None
        self._shown: dict[str, _Shown] = {}
        self._watched: dict[str, float] = {}  # by page, when it was asked for
        self._pages_drawn: dict[str, int] = {}  # by page, of which version it is
        self._version = 0
        self._has_news = self._has_turned = True
        self._has_new_verdict = False  # one that the pages do not show yet
        self._how: tuple[object, ...] = ()
        self._drawing: Future[_Drawing] | None = None
        self._diagnosing: Future[_Diagnosed] | None = None
        self._diagnosis_started = self._started = _AsOf(step=0, at=0.0)
        self._drawn: _AsOf | None = None
        self._diagnosed: _AsOf | None = None
        self._gone: DtprofError | None = None
        self.source: Source | None = None
        self.pages: Sequence[Dashboard] = ()
        self.asked = clock()

    def since(self, version: int, page: str = "") -> dict[str, Any]:
        """Return the changes of a page after a version, the newest version, and the status of the job.

        Parameters:
            version: of the page.
            page: its name; the first one where there is none of that name.
        """
        with self._lock:
            self.asked = self._clock()
            self._poll()
            chosen = [page_ for page_ in self.pages if page_.name == page] or self.pages[:1]
            self._watched |= {page_.name: self.asked for page_ in chosen}
            self._draw_pages(chosen)
            changed = {
                panel.anchor: shown.document
                for page_ in chosen
                for panel in page_.panels
                if (shown := self._shown[panel.anchor]).version > version
            }
            return {
                "version": self._version,
                "pages": [page.name for page in self.pages],
                "status": self._status(),
                "now": self._now(),
                "documents": {
                    anchor: {"markup": found.markup, "drawing": found.drawing} for anchor, found in changed.items()
                },
            }

    def first(self) -> tuple[Source, Sequence[Dashboard], Mapping[str, Document], int]:
        """Return the head of the pages, and its version.

        Raises:
            DtprofError: there is nothing to begin with.
        """
        with self._lock:
            self.asked = self._clock()
            self._poll()
            if self.source is None:
                if self._drawing is None:
                    self._begin_drawing()
                self._take_drawing(wait_s=None)
            if self.source is None:
                raise self._gone or NotARunError(f"{self._monitor.run} could not be read; try again")
            self._draw_pages(self.pages)
            return self.source, self.pages, {at: shown.document for at, shown in self._shown.items()}, self._version

    def now(self) -> float:
        """Return the time by the clock that `asked` is of."""
        return self._clock()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._monitor.close()

    def _poll(self) -> None:
        self._take_drawing(wait_s=0)
        # Figures that are due are drawn from new records, whatever the poll costs.
        may_poll = self._poll_interval.is_due or self._refresh_interval.is_due
        if self._clock() - self._polled < POLL_EVERY_S or not may_poll:
            if self._snapshot is not None:
                self._renew_verdict(self._snapshot)  # it reads the records itself
            return
        self._polled, began_cpu = self._clock(), self._cpu()
        had_ended = self._snapshot is not None and self._snapshot.has_ended
        try:
            self._snapshot = self._monitor.poll()
            self._gone = None
        except DtprofError as error:  # the last known state stays on the page
            self._gone = error
            return
        finally:
            self._poll_interval.charge(self._cpu() - began_cpu, since=self._polled)
        ends = self._snapshot.has_ended and not had_ended
        self._has_turned |= self._turns(self._snapshot)
        self._has_news |= self._snapshot.has_moved or self._has_turned
        is_urgent = (self._has_turned or self._has_new_verdict) and self._turn_interval.is_due
        is_due = self._refresh_interval.is_due or is_urgent or ends
        if (self._has_news or self._has_new_verdict) and is_due and self._drawing is None:
            self._begin_drawing()
            self._take_drawing(wait_s=AT_ONCE_S)
        self._renew_verdict(self._snapshot)

    def _turns(self, snapshot: JobSnapshot) -> bool:
        """Say whether ranks exited, stalled or reported mismatches since the last poll: then diagnose at once."""
        before, ends = self._how, [rank.end for rank in snapshot.ranks]
        self._how = (snapshot.has_ended, snapshot.is_stalled, len(snapshot.mismatches), *ends)
        return self._how != before

    def _renew_verdict(self, snapshot: JobSnapshot) -> None:
        """Start a diagnosis that is due; redraw the pages if the verdict has changed."""
        summary = self.source.summary if self.source is not None else None
        is_due = self._diagnose_interval.is_due and not snapshot.has_ended and self._drawing is None
        if self._diagnosing is None and is_due and summary is not None:
            self._diagnosis_started = _AsOf(step=snapshot.step, at=self._clock())
            self._diagnosing = self._begin(self._to_diagnose(summary, snapshot))
        if self._diagnosing is None or not self._diagnosing.done():
            return
        finished, self._diagnosing = self._diagnosing, None
        try:
            found = finished.result()
        except DtprofError as error:
            self._gone = error
            return
        self._diagnose_interval.charge(found.taken_s, since=self._diagnosis_started.at)
        self._has_new_verdict |= self._verdict is None or _essence(found.verdict) != _essence(self._verdict)
        self._verdict, self._diagnosed = found.verdict, self._diagnosis_started

    def _to_diagnose(self, summary: Summary, snapshot: JobSnapshot) -> Callable[[], _Diagnosed]:
        def diagnose() -> _Diagnosed:
            began = self._cpu()
            verdict = self._diagnose(self._monitor.run, summary, goes_well=snapshot.goes_well)
            return _Diagnosed(verdict=verdict, taken_s=self._cpu() - began)

        return diagnose

    def _begin_drawing(self) -> None:
        """Start drawing the newest steps, or all steps of a job that has ended."""
        snapshot = self._snapshot
        diagnoses = self._has_turned
        self._has_news = self._has_turned = self._has_new_verdict = False
        self._started = _AsOf(step=snapshot.step if snapshot is not None else 0, at=self._clock())
        window = None if snapshot is not None and snapshot.has_ended else self._monitor.window.frozen()
        self._watched = {page: at for page, at in self._watched.items() if self._clock() - at <= WATCHED_S}
        watched = frozenset(self._watched)
        goes_well = snapshot is not None and snapshot.goes_well
        self._drawing = self._begin(lambda: self._draw(window, watched, diagnoses=diagnoses, goes_well=goes_well))

    def _draw(
        self, window: LiveWindow | None, watched: Collection[str], *, diagnoses: bool, goes_well: bool
    ) -> _Drawing:
        began = self._cpu()
        on_disk = open_run(self._monitor.run)
        shown = self.source
        has_details = shown is None or window is None or diagnoses or self._detail_interval.is_due
        figures = self._aggregates.take(window) if window is not None else None
        detailed, closeup = (
            examine(window or on_disk, THIS_PROCESS) if shown is None or has_details else (shown.summary, shown.closeup)
        )
        summary = detailed
        if figures is not None:
            summary = replace(
                figures.summary,
                timeline=detailed.timeline,
                critical_path=detailed.critical_path,
                advice=detailed.advice,
            )
        examined = self._cpu()
        verdict = None
        if diagnoses:
            known = summary if window is not None else None
            verdict = self._diagnose(self._monitor.run, known, goes_well=goes_well)
        diagnosed = self._cpu()
        source = self._gather(on_disk, summary, closeup, verdict or self._verdict)
        pages = self._make_pages(source)
        return _Drawing(
            source=source,
            pages=pages,
            documents={page.name: render_page(page, source, pages) for page in pages if page.name in watched},
            newest=figures.newest if figures is not None else None,
            has_details=has_details,
            verdict=verdict,
            taken_s=examined - began + self._cpu() - diagnosed,
            diagnosed_s=diagnosed - examined,
        )

    def _take_drawing(self, *, wait_s: float | None) -> None:
        """Show a finished drawing; keep the previous one if it failed."""
        if self._drawing is None:
            return
        wait([self._drawing], wait_s)
        if not self._drawing.done():
            return
        finished, self._drawing = self._drawing, None
        try:
            found = finished.result()
        except DtprofError as error:
            self._gone = error
            return
        self.source, self.pages, self._drawn, self._newest = found.source, found.pages, self._started, found.newest
        self._monitor.summary = found.source.summary
        if found.verdict is not None:
            self._verdict, self._diagnosed = found.verdict, self._started
            self._diagnose_interval.charge(found.diagnosed_s)
        self._version += 1
        there = {panel.anchor for page in found.pages for panel in page.panels}
        self._shown = {anchor: shown for anchor, shown in self._shown.items() if anchor in there}
        for page, documents in found.documents.items():
            self._show(page, documents)
        # Details are charged to their own interval, or they would delay the next figures.
        if found.has_details:
            self._detail_interval.charge(found.taken_s)
        self._refresh_interval.charge(0.0 if found.has_details else found.taken_s, since=self._started.at)
        self._turn_interval.charge(found.taken_s + found.diagnosed_s)

    def _draw_pages(self, pages: Sequence[Dashboard]) -> None:
        """Draw those of these pages that are not of the newest version."""
        for page in pages:
            if self.source is not None and self._pages_drawn.get(page.name) != self._version:
                self._show(page.name, render_page(page, self.source, self.pages))

    def _show(self, page: str, documents: Mapping[str, Document]) -> None:
        """Take the new documents of a page; unchanged ones keep their version."""
        self._pages_drawn[page] = self._version
        for anchor, document in documents.items():
            as_sent = json.dumps([document.markup, document.drawing], sort_keys=True)
            digest = hashlib.sha256(as_sent.encode()).digest()
            known = self._shown.get(anchor)
            if known is None or known.digest != digest:
                self._shown[anchor] = _Shown(version=self._version, digest=digest, document=document)

    def _gather(self, on_disk: Run, summary: Summary, closeup: Closeup | None, verdict: Verdict | None) -> Source:
        nodes = on_disk.node_samples(max_samples=min(MAX_NODE_SAMPLES, samples_each(len(summary.hosts))))
        return Source(
            summary=summary,
            closeup=closeup,
            verdict=verdict,
            nodes=follow_devices(nodes.values()),
            reported=list_reported(on_disk.mismatches, verdict, started_ns=on_disk.manifest.started_realtime_ns),
        )

    def _status(self) -> dict[str, Any]:
        snapshot = self._snapshot
        if self._gone is not None or snapshot is None:
            return {"state": "gone", "text": f"showing the last known state: {self._gone}", "alarms": [], "age": ""}
        step = f"step {format_count(snapshot.step)}"
        alarms = list(snapshot.alarms)
        if snapshot.has_ended:
            end = f" with exit status {snapshot.exit_status}" if snapshot.exit_status is not None else ""
            return {"state": "ended", "text": f"ended{end}, {step}", "alarms": alarms, "age": ""}
        newest = f", {snapshot.progress.words}" if snapshot.progress.state == Progress.SLOW else ""
        state, text = "running", "running"
        if snapshot.job_problem:
            state, text = "unknown", "cannot tell whether it goes on"
        drawn, diagnosed = self._describe_age(self._drawn), self._describe_age(self._diagnosed)
        text += f", {step}{newest}"
        text += f"; figures as of {drawn}" if drawn else ""
        if diagnosed and diagnosed != drawn:
            text += f", verdict as of {diagnosed}"
        return {"state": state, "text": text, "alarms": alarms, "age": drawn}

    def _describe_age(self, as_of: _AsOf | None) -> str:
        """Return the step of a drawing or diagnosis and its age; empty before the first."""
        if as_of is None:
            return ""
        return f"step {format_count(as_of.step)} ({format_age(self._clock() - as_of.at)} ago)"

    def _now(self) -> str | None:
        """Return the table of the activity of ranks; None once the job has ended."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.has_ended or not snapshot.ranks:
            return None
        return render_now(snapshot, self._newest)


def _essence(verdict: Verdict) -> tuple[object, ...]:
    """Return the parts of a verdict whose change is news: not its figures, which differ each time."""
    return verdict.outcome, *((finding.kind, finding.culprit_ranks, finding.seq) for finding in verdict.findings)
