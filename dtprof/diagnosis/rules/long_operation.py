"""All others waited for one long operation of a rank: a checkpoint, a compilation, or the work its stack shows."""

from collections.abc import Iterable, Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, wait_words
from dtprof.diagnosis.job_state import JobState, LongPhase, RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
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
    found: list[tuple[RankState, LongPhase, dict[int, int]]] = []
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
    work = f"in a {phase.phase}" if phase.phase else "outside any collective"
    yield Finding(
        kind="long-operation",
        severity="warning",
        summary=f"Rank {rank.rank} spent {took_s:.0f} s {work}{at_line(place)}; "
        f"{wait_words(waiting)} for it all the while.",
        culprit_ranks=(rank.rank,),
        waiting_ranks=waiting,
        confidence=0.9,
        culprit_call_sites={rank.rank: place} if place else {},
        evidence=(f"the others were in a collective for {min(waited.values()) / 1e9:.0f} s of it, at least",),
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


def _waits_of_all(ranks: Iterable[RankState], phase: LongPhase) -> dict[int, int]:
    """Return for how long each rank waited during the phase; nothing where one of them waited too little."""
    waited: dict[int, int] = {}
    for rank in ranks:
        waited[rank.rank] = _waited_ns(rank, phase)
        if waited[rank.rank] < MIN_WAITED * (phase.end_ns - phase.begin_ns):
            return {}
    return waited


def _waited_ns(rank: RankState, phase: LongPhase) -> int:
    """Return the longest stretch of the phase during which a rank was in one operation."""
    longest = 0
    for operation in rank.operations:
        # In order of issue: no later one can overlap, and to build thousands of them costs a live page its verdict.
        if operation.issued_ns >= phase.end_ns:
            break
        end = operation.done_ns if operation.done_ns != UNKNOWN_NS else phase.end_ns
        longest = max(longest, min(end, phase.end_ns) - max(operation.issued_ns, phase.begin_ns))
    return longest


RULES: Declared = (Rule(kinds=("long-operation",), stages=(Stage.RISK,), find=find_long_operation),)
