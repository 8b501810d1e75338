"""Record a job: launch it, diagnose its hangs and compare its ranks while it runs, and report how it ended.

What diagnoses is loaded when it is needed first: a launch waits for none of it.
"""

import importlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import torch_versions
from dtprof.errors import OutputError
from dtprof.fence import fenced
from dtprof.launch import child_process, comparison_thread, hang_watcher, job_launch
from dtprof.launch.launcher_thread import NICENESS, LauncherThread

if TYPE_CHECKING:
    from dtprof.records.reader import Run
    from dtprof.records.shared_follower import Subscription

WHY_UNARMED = (
    "they run on other hosts, ended before they joined, or run Python with -E, -I, -S or a cleared environment"
)


def record_job(command: Sequence[str], settings: job_launch.JobSettings) -> int:
    """Run a command with its ranks recorded; return the exit status of `dtprof run`.

    Raises:
        OutputError: the run directory cannot be made.
        CommandNotFoundError: the command cannot be started.
    """
    end = job_launch.run_job(command, settings, diagnose_stalled, compare=compare_while_running)
    if end.run is not None:
        _print_end(end.run, end)
    return job_launch.EXIT_HANG if end.stopped_by_us else child_process.end_like(end.status)


def prune_beside(store: Path) -> None:
    """Remove, in a thread, this user's runs in a store of every job that its policy does not keep."""

    @fenced("the removal of old runs", "has ended")
    def prune() -> None:
        from dtprof.launch.always_on import read_policy, user_folder
        from dtprof.session import stored_runs
        from dtprof.session.run_index import RunFilter
        from dtprof.session.run_retention import Policy

        try:
            own = user_folder(store)
        except OutputError:
            return  # the job is not recorded for the same reason, and says so
        going = stored_runs.surplus(own, RunFilter(), Policy(**read_policy(store)))
        stored_runs.remove(own, [facts for facts, _ in going])

    LauncherThread(prune, "retention", niceness=NICENESS).start()


def compare_while_running(records: "Subscription") -> comparison_thread.Compare:
    """Return the function that compares new records of the ranks of this host, and yields mismatched operations."""
    from dtprof.diagnosis.findings import Verdict
    from dtprof.diagnosis.live_comparison import LiveComparison
    from dtprof.diagnosis.reported_mismatches import MismatchKey
    from dtprof.records.run_follower import with_open
    from dtprof.report.text.verdict_text import verdict_text

    importlib.import_module("dtprof.session.run_diagnosis")  # what a hang is diagnosed with: nobody waits for it yet
    comparison = LiveComparison()

    def compare(is_last: bool) -> Iterator[comparison_thread.Mismatch]:
        for growths, is_whole in records.take():
            ends = is_last and is_whole
            grown = [with_open(growth) if ends else growth.tables for growth in growths.values()]
            seen = tuple(tables.rank for tables in grown)
            for finding in comparison.take(grown, is_last=ends):
                verdict = Verdict(
                    outcome="risk", source=("run",), ranks_seen=seen, ranks_missing=(), findings=(finding,)
                )
                key = MismatchKey.of(finding)
                yield comparison_thread.Mismatch(**key._asdict(), summary=finding.summary, text=verdict_text(verdict))

    return compare


def diagnose_stalled(run: Path) -> hang_watcher.StallVerdict:
    """Return the verdict on a job that has made no progress for the stall threshold."""
    from dtprof.report.text.verdict_text import verdict_text
    from dtprof.session.run_diagnosis import diagnose_running

    verdict = diagnose_running(run, is_stalled=True)
    return hang_watcher.StallVerdict(
        # A rank that raised may live on, in a thread that does not end, and its launcher wait for it.
        is_hang=verdict.outcome in ("hang", "crash"),
        text=verdict_text(verdict),
        is_unclear=verdict.outcome == "unknown",
        is_early=any(finding.is_early for finding in verdict.findings),
        headline=" ".join(finding.summary for finding in verdict.findings),
    )


@fenced("the closing note", "is not printed")
def _print_end(run: Path, end: job_launch.JobEnd) -> None:
    """Print on stderr the path of the run, the missing ranks, and the next command."""
    from dtprof.diagnosis.sources.waiting_launchers import find_rendezvous
    from dtprof.formatting import list_ranks
    from dtprof.job.world_size import read_world_size
    from dtprof.records.reader import open_run

    shown = os.path.relpath(run)
    shown = str(run) if shown.startswith("..") else shown
    opened = open_run(run)
    world_size = read_world_size(opened.folders)
    waited = not world_size and bool(find_rendezvous(opened.exit_records.stacks))
    if not world_size and not waited:
        if not _is_torch_too_old(opened):  # said at the start
            job_launch.say(f"no rank was recorded ({_why_nothing(opened, end.status)})")
    elif world_size:
        missing = [rank for rank in range(world_size) if rank not in opened.folders]
        if missing:
            named = list_ranks(missing).split(maxsplit=1)[1]
            job_launch.say(f"these ranks of {world_size} left no record: {named} ({WHY_UNARMED})")
    if end.status != 0 and (world_size or waited):
        from dtprof.session.run_diagnosis import diagnose_running
        from dtprof.session.stored_runs import keep_verdict

        verdict = diagnose_running(run)
        keep_verdict(run, verdict)
        if verdict.faults and not end.stopped_by_us:
            job_launch.say(verdict.faults[0].summary)
    job_launch.say(f"run kept in {shown}")
    if world_size and opened.manifest.settings.keys() & {"trace_steps", "trace_every"}:
        from dtprof.session.trace_windows import closing_note

        for line in closing_note(opened, opened.load(opened.ranks[0]), shown):
            job_launch.say(line)
    if world_size or waited:
        following = "diagnose" if end.status != 0 or opened.mismatches else "summary"
        job_launch.say(f"next: dtprof {following} {shown}")


def _is_torch_too_old(opened: "Run") -> bool:
    found = {str(process.get("torch", "")) for process in opened.processes}
    return bool(found) and all(map(torch_versions.is_too_old, found))


def _why_nothing(opened: "Run", status: int) -> str:
    from dtprof.formatting import format_bytes
    from dtprof.records import schema

    if opened.processes:
        if (free := shutil.disk_usage(opened.path).free) < schema.SEGMENT_SIZE:
            needed = format_bytes(schema.SEGMENT_SIZE)
            return (
                f"the disk of the run has {format_bytes(free)} left, and a rank takes {needed} when it begins its log"
            )
        return "torch was imported, but no process joined a group, ran a backward pass or an optimizer step"
    unreached = "no Python process with torch was reached"
    if status:
        return f"{unreached} before the command ended with status {status}: see what it printed"
    return (
        f"{unreached}: `dtprof inject install` beforehand reaches one started with -E, -I or a cleared environment, "
        "`import dtprof.auto` in the program one started with -S"
    )
