"""A rank ran out of batches while the others go on."""

from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import call_sites, victims
from dtprof.diagnosis.findings import Finding, capitalised, wait_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rules.group_creation_mismatch import all_complete

KINDS = ("uneven-inputs",)
FOLLOWS_FROM_UNEVEN_INPUTS = {
    "rank-exited",
    "rank-skipped-collective",
    "collective-order-mismatch",
    "size-mismatch",
    "dtype-mismatch",
    "root-mismatch",
    "step-mismatch",
    "group-order-inversion",
    "wrong-group",
    "p2p-unmatched",
    "backend-stall",
    "rank-stuck",
}


def find_uneven_inputs(job: JobState, cause: Finding) -> Finding:
    """Return the finding for ranks that ran out of batches where that explains another cause, else that cause."""
    if cause.kind not in FOLLOWS_FROM_UNEVEN_INPUTS:
        return cause
    counted = all_complete(job)
    least = min(rank.exhausted for rank in job.ranks.values())
    out = {
        rank.rank: rank
        for rank in job.ranks.values()
        if rank.newest_is_exhaustion and (rank.exhausted > least or not counted)
    }
    going_on = [rank for rank in job.ranks.values() if rank.rank not in out]
    if not out or 2 * len(out) > len(job.ranks) or any(rank.batches < 1 for rank in going_on):
        return cause
    most = max(rank.batches for rank in going_on)
    culprits = tuple(sorted(rank for rank, own in out.items() if own.batches < most or not counted))
    if not culprits:
        return cause
    held_up = tuple(sorted(set(victims(job, set(culprits))) | set(cause.waiting_ranks) - set(culprits)))
    operations = {rank: operation for rank in held_up if (operation := job.ranks[rank].first_blocking) is not None}
    places = {rank: place for rank in culprits if (place := job.ranks[rank].place) is not None}
    first = out[culprits[0]]
    after = f" after {first.batches}" if counted else ""
    return replace(
        cause,
        kind="uneven-inputs",
        summary=f"{capitalised(culprits)} ran out of batches{after}, and left the loop; "
        f"{wait_words(held_up)} for {'it' if len(culprits) == 1 else 'them'} in the next step.",
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=0.9 if counted else 0.75,
        call_sites=call_sites(operations) or cause.call_sites,
        culprit_call_sites=places or cause.culprit_call_sites,
        evidence=(
            f"data loaders gave {first.batches} batches to rank {first.rank}, and up to {most} to the others so far"
            if counted
            else f"the last that the data loader of rank {first.rank} gave was no batch; events were dropped, so that "
            "nobody knows how many each rank had",
            *cause.evidence[:2],
        ),
        advice=(
            "Give every rank as many batches (DistributedSampler, drop_last), or train inside "
            "torch.distributed.algorithms.Join.",
        ),
    )
