"""How long ranks stood still between two attempts, of the job or of one replica of it."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from dtprof.analysis.map_reduce.survey import SurveyedRun
from dtprof.analysis.results import Caveat, Recovery
from dtprof.analysis.steps.step_boundaries import find_steps_of
from dtprof.formatting import list_ranks
from dtprof.job.world_size import newest_attempt
from dtprof.records.tables import UNKNOWN_NS, RankTables


def find_recoveries(run: SurveyedRun) -> tuple[Recovery, ...]:
    """Return each restart of the job, or of a replica, in the order of time: what follows a process that failed.

    Time is lost from the last record of the attempt before to the end of the first step of the next one, on the rank
    that lost most. Steps that are done once more since the last checkpoint are not in it: records do not tell them.
    """
    replicas = run.manifest.replicas
    ranks_each = -(-(max(run.folders, default=0) + 1) // replicas)
    lost: dict[tuple[int, int], dict[int, tuple[int, int | None]]] = defaultdict(dict)
    for rank, attempts in run.folders.items():
        for (number, _), (after, _) in pairwise(attempts):
            before = run.load(rank, number)
            if not _has_finished(run, before):
                lost[after, rank // ranks_each][rank] = _times(before, run.load(rank, after))
    found = []
    for (_, replica), by_rank in lost.items():
        ended = [stopped for stopped, _ in by_rank.values()]
        spans = [None if stepped is None else stepped - stopped for stopped, stepped in by_rank.values()]
        known = [span for span in spans if span is not None and span > 0]
        found.append(
            (
                min(ended),
                Recovery(
                    replica=replica if replicas > 1 else None,
                    ranks=tuple(sorted(by_rank)),
                    lost_ns=max(known) if len(known) == len(spans) else None,
                ),
            )
        )
    return tuple(recovery for _, recovery in sorted(found, key=lambda item: item[0]))


def _times(before: RankTables, after: RankTables) -> tuple[int, int | None]:
    """Return when an attempt was last active and when the next one ended its first step, ns since 1970."""
    windows = find_steps_of(after).windows
    stepped = int(windows[0, 0]) + after.monotonic_to_realtime_ns if len(windows) else None
    return before.last_ns + before.monotonic_to_realtime_ns, stepped


def _has_finished(run: SurveyedRun, tables: RankTables) -> bool:
    """Say whether a process came to its end, so that one after it is another program."""
    process_exit = run.exit_of(tables.host, tables.pid)
    if process_exit is not None and process_exit.status:
        return False
    return tables.ended_ns != UNKNOWN_NS and not tables.exceptions


def describe_attempts(run: SurveyedRun, recoveries: Sequence[Recovery]) -> list[Caveat]:
    """Return the caveats about how the job ended and about earlier attempts, which no other figure shows."""
    return [*_describe_end(run), *_describe_restarts(run, recoveries)]


def _describe_end(run: SurveyedRun) -> list[Caveat]:
    """Say what no rank's records show: that dtprof's signal ended them, or how a job without ranks ended."""
    if run.manifest.stopped_on_hang:
        return [Caveat("run", "the job hung and dtprof stopped it, as --on-hang stop asked")]
    if not run.folders and run.manifest.exit_status:
        return [Caveat("run", f"the command exited with status {run.manifest.exit_status}")]
    return []


def _describe_restarts(run: SurveyedRun, recoveries: Sequence[Recovery]) -> list[Caveat]:
    newest = newest_attempt(run.folders)
    if not newest:
        return []
    if not recoveries and any(len(attempts) > 1 for attempts in run.folders.values()):
        return [Caveat("run", "several programs ran one after the other under the same ranks; only the last is shown")]
    if not recoveries or recoveries[0].replica is None:
        return [Caveat("run", f"the job was restarted; only the last attempt ({newest}) is shown")]
    ranks = sorted({rank for recovery in recoveries for rank in recovery.ranks})
    return [Caveat("run", f"replicas were restarted ({list_ranks(ranks)}); only their last attempts are shown")]
