"""The feed of a live page: what changed and no more, in a bounded share of the time."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dtprof.analysis.results import Summary
from dtprof.diagnosis.findings import Verdict
from dtprof.errors import DtprofError
from dtprof.job.stalls import HANG_AFTER_S
from dtprof.monitor.polling_interval import PollingInterval
from dtprof.monitor.web import page_feed as feed_module
from dtprof.monitor.web.page_feed import DIAGNOSE_EVERY_S, REFRESH_EVERY_S, REFRESH_SHARE, DiagnoseRun, Feed
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import Dashboard, load_report
from dtprof.report.pages.page_panels import Document, panel_names, render_page
from dtprof.session.run_diagnosis import diagnose_run, diagnose_running
from tests import builders
from tests.builders import RankBuilder
from tests.monitor.test_live_run import MS, two_ranks
from tests.monitor.test_top_screen import running, tell_mismatch

Result = TypeVar("Result")


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def done_at_once(work: Callable[[], Result], /) -> Future[Result]:
    """Do work before anything else."""
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    except DtprofError as error:
        future.set_exception(error)
    return future


def diagnose_followed(run: Path, summary: Summary | None, /, *, goes_well: bool) -> Verdict:
    """Diagnose a run as `dtprof dashboard` does."""
    if summary is None:
        return diagnose_run(run)
    return diagnose_running(run, summary=summary, goes_well=goes_well)


def feed_of(
    run: Path,
    clock: Callable[[], float],
    cpu: Callable[[], float] | None = None,
    diagnose: DiagnoseRun | None = None,
) -> Feed:
    return Feed(
        run,
        pages=lambda source: load_report(panel_names(), available=source.available),
        diagnose=diagnose or diagnose_followed,
        clock=clock,
        cpu=cpu or clock,
        begin=done_at_once,
    )


def grow(run: Path, num_steps: int, scratch: Path) -> None:
    """Let the run go on to so many steps."""
    rewrite(run, two_ranks(num_steps), scratch)


def rewrite(run: Path, ranks: Sequence[RankBuilder], scratch: Path) -> None:
    """Let the run hold what these ranks recorded."""
    grown = running(ranks, scratch)
    for rank in ("rank-00000.0", "rank-00001.0"):
        with (run / rank / "events.00000").open("r+b") as file:
            file.write((grown / rank / "events.00000").read_bytes())


def test_only_what_changed_is_sent(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock)
    source, pages, documents, version = feed.first()
    assert source.summary.steps.count == 8
    assert set(documents) == {panel.anchor for page in pages for panel in page.panels}
    everything = feed.since(0)["documents"]
    assert set(everything) == {panel.anchor for panel in pages[0].panels}
    assert feed.since(version)["documents"] == {}
    grow(run, 12, tmp_path / "grown")
    clock.now += 30
    news = feed.since(version)
    assert news["version"] > version
    assert news["status"]["text"].startswith("running, step 12")
    assert 0 < len(news["documents"]) < len(everything)
    assert feed.since(news["version"])["documents"] == {}


def test_page_is_drawn_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock)
    *_, version = feed.first()
    drawn = []

    def note(page: Dashboard, source: Source, pages: Sequence[Dashboard]) -> dict[str, Document]:
        drawn.append(page.name)
        return render_page(page, source, pages)

    monkeypatch.setattr(feed_module, "render_page", note)
    feed.since(version, "memory")
    grow(run, 12, tmp_path / "grown")
    clock.now += REFRESH_EVERY_S
    newest = feed.since(version, "memory")["version"]
    assert (newest, drawn) == (version + 1, ["memory"])
    assert "memory-course" in feed.since(version, "memory")["documents"]
    assert "step-times" in feed.since(version, "overview")["documents"]
    assert feed.since(newest, "overview")["documents"] == {}
    assert drawn == ["memory", "overview"]


def test_page_that_there_is_not_is_the_first_one(tmp_path: Path) -> None:
    feed = feed_of(running(two_ranks(8), tmp_path / "run"), Clock())
    assert feed.since(0, "<script>")["documents"].keys() == feed.since(0)["documents"].keys()


def test_status_is_newer_than_the_figures_and_says_so(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock, cpu = Clock(), Clock()
    feed = feed_of(run, clock, cpu)
    version = feed.since(0)["version"]
    feed._refresh_interval.charge(1.0)  # a second of drawing
    grow(run, 9, tmp_path / "grown")
    clock.now += 1
    news = feed.since(version)
    assert news["version"] == version
    assert news["status"]["text"].startswith("running, step 9")
    assert news["status"]["text"].endswith("; figures as of step 8 (1 s ago)")
    clock.now += 1.0 / REFRESH_SHARE
    assert feed.since(version)["version"] == version + 1


def test_mismatch_is_shown_though_no_rank_moves(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock)
    version = feed.since(0)["version"]
    summary = tell_mismatch(run, 3, after_s=12)
    clock.now += 5
    news = feed.since(version)
    assert any(summary in alarm for alarm in news["status"]["alarms"])
    assert feed.source is not None
    assert [one.summary for one in feed.source.reported] == [summary]
    assert "hang" in news["pages"]
    clock.now += 1
    assert feed.since(news["version"])["documents"] == {}


def test_job_that_hangs_is_diagnosed_though_no_rank_moves(tmp_path: Path) -> None:
    ranks = two_ranks(8)
    ranks[1].op("all_reduce", 900 * MS)
    run = running(ranks, tmp_path / "run")
    clock = Clock()
    diagnosed = []

    def diagnose(path: Path, summary: Summary | None, /, *, goes_well: bool) -> Verdict:
        diagnosed.append(goes_well)
        return diagnose_followed(path, summary, goes_well=goes_well)

    feed = feed_of(run, clock, diagnose=diagnose)
    feed.since(0)
    assert diagnosed == [True]
    clock.now += 1
    feed.since(0)
    assert diagnosed == [True]
    clock.now += HANG_AFTER_S
    alarms = feed.since(0)["status"]["alarms"]
    assert alarms[0].startswith("stalled: no rank has made progress for")
    assert diagnosed == [True, False]


def test_verdict_is_renewed_between_drawings_and_another_one_has_the_pages_drawn(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock, outcomes = Clock(), ["healthy"]

    def diagnose(path: Path, summary: Summary | None, /, *, goes_well: bool) -> Verdict:
        return replace(diagnose_followed(path, summary, goes_well=goes_well), outcome=outcomes[-1])

    feed = feed_of(run, clock, Clock(), diagnose=diagnose)
    version = feed.since(0)["version"]
    feed._refresh_interval.charge(1.0)  # a second of drawing: none is due for long
    grow(run, 9, tmp_path / "grown")
    clock.now += DIAGNOSE_EVERY_S
    news = feed.since(version)
    assert (news["version"], feed._refresh_interval.is_due) == (version, False)
    assert news["status"]["text"].endswith(
        f"figures as of step 8 ({DIAGNOSE_EVERY_S:.0f} s ago), verdict as of step 9 (0 s ago)"
    )
    outcomes.append("risk")
    for _ in range(2):
        clock.now += DIAGNOSE_EVERY_S
        news = feed.since(version)
    assert news["version"] == version + 1
    assert feed.source is not None
    assert feed.source.verdict is not None
    assert feed.source.verdict.outcome == "risk"


def test_polling_interval_keeps_to_its_share() -> None:
    clock = Clock()
    interval = PollingInterval(every_s=1.0, share=0.01, clock=clock)
    count, busy = 0, 0.0
    for _ in range(10_000):
        clock.now += 0.1
        if interval.is_due:
            clock.now += 0.2
            busy += 0.2
            count += 1
            interval.charge(0.2)
    assert count > 10
    assert busy / (clock.now - 100) <= 0.0101


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_what_was_seen_last_stays_when_the_run_is_gone(how: str, tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock)
    version = feed.since(0)["version"]
    run.rename(tmp_path / "elsewhere")
    clock.now += 5
    news = feed.since(0)
    assert news["status"]["state"] == "gone"
    assert "showing the last known state" in news["status"]["text"]
    assert news["documents"]
    if how == "moved":  # and back
        (tmp_path / "elsewhere").rename(run)
        clock.now += 5
        assert feed.since(version)["status"]["state"] == "running"


def test_whole_run_is_shown_once_it_has_ended(tmp_path: Path) -> None:
    run = running(two_ranks(80), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock)
    source, *_ = feed.first()
    assert source.summary.steps.used is not None
    assert source.summary.steps.used[0] >= 30
    ended = builders.write_run(tmp_path / "ended", two_ranks(80))
    (run / "run.json").write_bytes((ended / "run.json").read_bytes())
    clock.now += 1
    assert feed.since(0)["status"] == {
        "state": "ended",
        "text": "ended with exit status 0, step 80",
        "age": "",
        "alarms": ["rank 0 was slow in backward: costs the others 20.0 ms a step"],
    }
    assert feed.source is not None
    assert feed.source.summary.steps.used is not None
    assert feed.source.summary.steps.used[0] < 10


def test_answer_does_not_wait_for_what_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "AT_ONCE_S", 0)
    run = running(two_ranks(8), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock)
    version = feed.since(0)["version"]
    started: list[tuple[Callable[[], Any], Future[Any]]] = []

    def begin(work: Callable[[], Any]) -> Future[Any]:
        started.append((work, Future()))
        return started[-1][1]

    feed._begin = begin
    grow(run, 9, tmp_path / "grown")
    clock.now += 300
    news = feed.since(version)
    assert (news["version"], len(started)) == (version, 1)  # the page is under way
    assert news["status"]["text"].startswith("running, step 9; figures as of step 8 (5 min ago)")
    assert "Step 8, the newest" in news["now"]
    for work, future in started:
        future.set_result(work())
    clock.now += 1
    news = feed.since(version)
    assert news["version"] == version + 1
    assert news["status"]["age"] == "step 9 (1 s ago)"
    assert "Step 9, the newest" in news["now"]


def test_table_of_this_moment_shows_names_as_text(tmp_path: Path) -> None:
    ranks = two_ranks(8)
    for rank in ranks:
        rank.span("phase:<script>alert(1)</script>", 900 * MS)
    news = feed_of(running(ranks, tmp_path / "run"), Clock()).since(0)
    assert "&lt;script&gt;" in news["now"]
    assert "<script" not in news["now"]


def test_verdict_follows_a_turn_though_drawing_is_not_due(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    clock = Clock()
    feed = feed_of(run, clock, Clock())
    version = feed.since(0)["version"]
    feed._refresh_interval.charge(1.0)
    summary = tell_mismatch(run, 3, after_s=12)
    clock.now += 2
    assert feed.since(version)["version"] == version + 1
    assert feed.source is not None
    assert [one.summary for one in feed.source.reported] == [summary]
