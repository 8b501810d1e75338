"""What the live pages of one run show: documents by panel, each with the version at which it last changed."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.analysis.closeup import Closeup, examine
from dtprof.analysis.device_course import follow_devices, samples_each
from dtprof.analysis.execution import THIS_PROCESS
from dtprof.analysis.results import Summary
from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.told import list_told
from dtprof.errors import DtprofError
from dtprof.figures.source import Source
from dtprof.formatting import format_count
from dtprof.live.monitor import Moment, Monitor
from dtprof.live.pace import Pace
from dtprof.report.page_dashboard import Dashboard
from dtprof.report.page_documents import render_documents
from dtprof.run_format.reader import Run, open_run

LOOK_EVERY_S = 0.5
DRAW_SHARE = 0.01
"""Of the time, that drawing may take; the panels are drawn as often as that allows, once a second at most."""
DRAW_EVERY_S = 1.0
DIAGNOSE_SHARE = 0.0025
DIAGNOSE_EVERY_S = 10.0
STILL_S = 3.0
"""Without a record, from which on the page says so."""

Pages = Callable[[Source], Sequence[Dashboard]]


@dataclass(frozen=True, kw_only=True)
class _Shown:
    version: int
    digest: bytes
    document: dict[str, Any]


class Feed:
    """Looks at a run when somebody asks, and draws what has changed; several threads may ask."""

    def __init__(
        self,
        run: Path,
        *,
        pages: Pages,
        diagnose: Callable[[Path], Verdict],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """Open the run.

        Args:
            run: the run directory.
            pages: which pages to show of what there is.
            diagnose: says what is wrong with a run.
            clock: seconds.
            cpu: processor time of the calling thread, seconds.

        Raises:
            NotARunError: there is none.
            NewerFormatError: it was written by a newer dtprof.
        """
        self._monitor = Monitor(run, summarises=False, clock=clock)
        self._make_pages, self._diagnose = pages, diagnose
        self._clock, self._cpu = clock, cpu
        self._lock = threading.Lock()
        self._draw_pace = Pace(every_s=DRAW_EVERY_S, share=DRAW_SHARE, clock=clock)
        self._diagnose_pace = Pace(every_s=DIAGNOSE_EVERY_S, share=DIAGNOSE_SHARE, clock=clock)
        self._looked = float("-inf")
        self._moment: Moment | None = None
        self._verdict: Verdict | None = None
        self._shown: dict[str, _Shown] = {}
        self._version = 0
        self._has_news = self._has_turned = True
        self._how: tuple[object, ...] = ()
        self._drawn_at_step = 0
        self._gone = ""
        self.source: Source | None = None
        self.pages: Sequence[Dashboard] = ()
        self.asked = clock()

    def since(self, version: int) -> dict[str, Any]:
        """Return the documents that changed after a version, the newest version, and how the job stands."""
        with self._lock:
            self.asked = self._clock()
            self._look()
            return {
                "version": self._version,
                "pages": [page.name for page in self.pages],
                "status": self._status(),
                "documents": {
                    anchor: shown.document for anchor, shown in self._shown.items() if shown.version > version
                },
            }

    def first(self) -> tuple[Source, Sequence[Dashboard], int]:
        """Return what the page begins with, and the version of that."""
        with self._lock:
            self.asked = self._clock()
            self._look()
            if self.source is None:
                self._draw()
            assert self.source is not None
            return self.source, self.pages, self._version

    def now(self) -> float:
        """Return the time by the clock that `asked` is of."""
        return self._clock()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._monitor.close()

    def _look(self) -> None:
        if self._clock() - self._looked < LOOK_EVERY_S:
            return
        self._looked = self._clock()
        had_ended = self._moment is not None and self._moment.has_ended
        try:
            self._moment = self._monitor.look()
            self._gone = ""
        except DtprofError as error:  # what was seen last stays on the page
            self._gone = str(error)
            return
        ends = self._moment.has_ended and not had_ended
        self._has_turned |= self._turns(self._moment)
        is_stuck = self._moment.is_stuck and self._diagnose_pace.is_due
        self._has_news |= self._moment.has_moved or self._has_turned or is_stuck
        if self._has_news and (self._draw_pace.is_due or ends):
            self._draw()

    def _turns(self, moment: Moment) -> bool:
        """Say whether the job has taken a turn since the last look, upon which it is diagnosed at once."""
        before, ends = self._how, [rank.end for rank in moment.ranks]
        self._how = (moment.has_ended, moment.is_stuck, len(moment.told), *ends)
        return self._how != before

    def _draw(self) -> None:
        """Analyse and draw the newest steps, of a job that has ended all; keep what was shown where that fails."""
        began = self._cpu()
        self._has_news = False
        try:
            has_ended = self._moment is not None and self._moment.has_ended
            on_disk = open_run(self._monitor.run)
            summary, closeup = examine(on_disk if has_ended else self._monitor.window, THIS_PROCESS)
            self._monitor.summary = summary
            if self._has_turned or self._diagnose_pace.is_due:
                self._has_turned = False
                diagnosed = self._cpu()
                self._verdict = self._diagnose(self._monitor.run)
                self._diagnose_pace.charge(self._cpu() - diagnosed)
                began += self._cpu() - diagnosed
            source = self._gather(on_disk, summary, closeup)
            pages = self._make_pages(source)
            documents = render_documents(source, pages)
        except DtprofError as error:
            self._gone = str(error)
            return
        self.source, self.pages = source, pages
        self._drawn_at_step = self._moment.step if self._moment is not None else 0
        self._version += 1
        for anchor, document in documents.items():
            as_sent = {"markup": document.markup, "drawing": document.drawing}
            digest = hashlib.sha256(json.dumps(as_sent, sort_keys=True).encode()).digest()
            known = self._shown.get(anchor)
            if known is None or known.digest != digest:
                self._shown[anchor] = _Shown(version=self._version, digest=digest, document=as_sent)
        for anchor in self._shown.keys() - documents.keys():
            del self._shown[anchor]
        self._draw_pace.charge(self._cpu() - began)

    def _gather(self, on_disk: Run, summary: Summary, closeup: Closeup) -> Source:
        nodes = on_disk.node_samples(max_samples=samples_each(len(summary.hosts)))
        return Source(
            summary=summary,
            closeup=closeup,
            verdict=self._verdict,
            nodes=follow_devices(nodes.values()),
            told=list_told(on_disk.mismatches, self._verdict, started_ns=on_disk.manifest.started_realtime_ns),
        )

    def _status(self) -> dict[str, Any]:
        moment = self._moment
        if self._gone or moment is None:
            return {"state": "gone", "text": f"what was seen last stays: {self._gone}", "alarms": []}
        step = f"step {format_count(moment.step)}"
        if moment.has_ended:
            end = f" with exit status {moment.exit_status}" if moment.exit_status is not None else ""
            return {"state": "ended", "text": f"ended{end}, {step}", "alarms": list(moment.alarms)}
        newest = f", no record for {moment.still_s:.0f} s" if moment.ranks and moment.still_s >= STILL_S else ""
        drawn = f"; figures as of step {format_count(self._drawn_at_step)}" if self._drawn_at_step else ""
        return {"state": "running", "text": f"running, {step}{newest}{drawn}", "alarms": list(moment.alarms)}
