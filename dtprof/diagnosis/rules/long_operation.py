"""All others waited for one long operation of a rank: a checkpoint, a compilation, or the work its stack shows."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, wait_words
from dtprof.diagnosis.job_state import JobState, LongPhase, RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.job.issued_operations import Operation
from dtprof.job.stalls import HANG_AFTER_S, SLOW_AFTER_NS, hang_after_of
from dtprof.records import events
from dtprof.records.sites import Site, site_of_stack
from dtprof.records.tables import UNKNOWN_NS

MIN_WAITED = 0.8
"""Share of the long work that each of the others spends waiting."""
ADVICE = {
    events.CHECKPOINT: "Save asynchronously, or on all ranks at once (torch.distributed.checkpoint).",
    events.COMPILE: "Keep compiled code in a cache that lasts (TORCHINDUCTOR_CACHE_DIR).",
    "": "Do it before training, share it among the ranks, or raise the timeout of the group.",
}


def find_long_operation(case: Case) -> Iterator[Finding]:
    """Give the finding for the longest work of some rank in which all others waited."""
    found: list[tuple[RankState, LongPhase, dict[int, Operation]]] = []
    ranks = case.job.ranks.values()
    min_ns = _min_long_ns(case.job)
    for rank in ranks:
        for phase in rank.long_phases:
            if phase.end_ns - phase.begin_ns < min_ns:
                continue
            waited = _waits_of_all((other for other in ranks if other.rank != rank.rank), phase)
            if waited:
                found.append((rank, phase, waited))
    if not found:
        return
    # A phase with a name says more than the gap between operations that it lies in.
    rank, phase, waited = max(found, key=lambda entry: (bool(entry[1].phase), entry[1].end_ns - entry[1].begin_ns))
    took_s = (phase.end_ns - phase.begin_ns) / 1e9
    place = phase.site or _find_sampled_line(rank, phase)
    waiting = tuple(sorted(waited))
    operation = waited[waiting[0]]
    shortest_ns = min(_share_ns(other, phase) for other in waited.values())
    work = f"in a {phase.phase}" if phase.phase else "outside any collective"
    yield Finding(
        kind="long-operation",
        severity="warning",
        summary=f"Rank {rank.rank} spent {took_s:.0f} s {work}{at_line(place)}; "
        f"{wait_words(waiting)} for it all the while.",
        culprit_ranks=(rank.rank,),
        waiting_ranks=waiting,
        grade=0.9,
        group=case.job.group(operation.group),
        op=operation.op,
        seq=operation.seq,
        step=operation.step,
        call_sites=call_sites(waited),
        culprit_call_sites={rank.rank: place} if place else {},
        evidence=(
            f"the others were in a collective for {shortest_ns / 1e9:.0f} s of it, at least",
            *(() if place else _list_bounds(rank, phase)),
        ),
        advice=(ADVICE[phase.phase],),
    )


def _min_long_ns(job: JobState) -> float:
    """Return the time from which an operation is long: --hang-after, where that is shorter than the default."""
    hang_after_s = hang_after_of(job.manifest.settings) or HANG_AFTER_S
    return max(SLOW_AFTER_NS, min(HANG_AFTER_S, hang_after_s) * 1e9)


def _find_sampled_line(rank: RankState, phase: LongPhase) -> Site | None:
    """Return where the rank was when its stack was taken, where that was during the work."""
    stack = rank.stack
    taken = stack is not None and stack.t_ns is not None and phase.begin_ns <= stack.t_ns <= phase.end_ns
    return site_of_stack(stack.frames) if stack is not None and taken and stack.frames else None


def _list_bounds(rank: RankState, phase: LongPhase) -> Iterator[str]:
    """Say between which lines the work lies, where the rank came from one operation to another."""
    at = bisect_left(rank.operations, phase.end_ns, key=lambda operation: operation.issued_ns)
    if 0 < at < len(rank.operations):
        before, after = rank.operations[at - 1 : at + 1]
        yield (
            f"rank {rank.rank} came to it from {before.op}{at_line(before.site)}, and went on to "
            f"{after.op}{at_line(after.site)}"
        )


def _waits_of_all(ranks: Iterable[RankState], phase: LongPhase) -> dict[int, Operation]:
    """Return in which operation each rank waited during the phase; nothing where one of them waited too little."""
    waited: dict[int, Operation] = {}
    for rank in ranks:
        # In order of issue: no later one can overlap, and to build thousands of them costs a live page its verdict.
        begun = itertools.takewhile(lambda operation: operation.issued_ns < phase.end_ns, rank.operations)
        longest = max(begun, key=lambda operation: _share_ns(operation, phase), default=None)
        if longest is None or _share_ns(longest, phase) < MIN_WAITED * (phase.end_ns - phase.begin_ns):
            return {}
        waited[rank.rank] = longest
    return waited


def _share_ns(operation: Operation, phase: LongPhase) -> int:
    """Return for how long of the phase a rank was in an operation."""
    end = operation.done_ns if operation.done_ns != UNKNOWN_NS else phase.end_ns
    return min(end, phase.end_ns) - max(operation.issued_ns, phase.begin_ns)


RULES: Declared = (Rule(kinds=("long-operation",), stages=(Stage.RISK,), find=find_long_operation),)
