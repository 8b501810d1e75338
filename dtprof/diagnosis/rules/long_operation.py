"""All others waited for one long checkpoint or compilation of a rank."""

from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, wait_words
from dtprof.diagnosis.job_state import LongPhase, RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.records import events
from dtprof.records.tables import UNKNOWN_NS, Site

MIN_LONG_NS = 10_000_000_000
MIN_WAITED = 0.8
"""Share of the long work that each of the others spends waiting."""


def find_long_operation(case: Case) -> Iterator[Finding]:
    """Give the finding for the longest checkpoint or compilation of some rank in which all others waited."""
    found: list[tuple[RankState, LongPhase, dict[int, int]]] = []
    ranks = case.job.ranks.values()
    for rank in ranks:
        for phase in rank.long_phases:
            if phase.end_ns - phase.begin_ns < MIN_LONG_NS:
                continue
            waited = {r.rank: _waited_ns(r, phase) for r in ranks if r.rank != rank.rank}
            if waited and min(waited.values()) >= MIN_WAITED * (phase.end_ns - phase.begin_ns):
                found.append((rank, phase, waited))
    if not found:
        return
    rank, phase, waited = max(found, key=lambda entry: entry[1].end_ns - entry[1].begin_ns)
    took_s = (phase.end_ns - phase.begin_ns) / 1e9
    place: Site | None = phase.site
    waiting = tuple(sorted(waited))
    advice = (
        "Save asynchronously, or on all ranks at once (torch.distributed.checkpoint)."
        if phase.phase == events.CHECKPOINT
        else "Keep compiled code in a cache that lasts (TORCHINDUCTOR_CACHE_DIR)."
    )
    yield Finding(
        kind="long-operation",
        severity="warning",
        summary=f"Rank {rank.rank} spent {took_s:.0f} s in a {phase.phase}{at_line(place)}; "
        f"{wait_words(waiting)} for it all the while.",
        culprit_ranks=(rank.rank,),
        waiting_ranks=waiting,
        confidence=0.9,
        culprit_call_sites={rank.rank: place} if place else {},
        evidence=(f"the others were in a collective for {min(waited.values()) / 1e9:.0f} s of it, at least",),
        advice=(advice,),
    )


def _waited_ns(rank: RankState, phase: LongPhase) -> int:
    """Return the longest stretch of the phase during which a rank was in one operation."""
    longest = 0
    for operation in rank.operations:
        end = operation.done_ns if operation.done_ns != UNKNOWN_NS else phase.end_ns
        longest = max(longest, min(end, phase.end_ns) - max(operation.issued_ns, phase.begin_ns))
    return longest


RULES: Declared = (Rule(kinds=("long-operation",), stages=(Stage.RISK,), find=find_long_operation),)
