"""Operations that do not agree: fingerprints of TORCH_DISTRIBUTED_DEBUG, gloo's and NCCL's own checks."""

from collections.abc import Callable, Hashable, Iterable

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.log_findings.log_rule import Suspicion, log_finding, log_rule
from dtprof.diagnosis.rule import Declared, Stage
from dtprof.diagnosis.sources.logs.log_facts import Fingerprint
from dtprof.diagnosis.sources.logs.logged_job import OWN_CHECK, LoggedJob, odd_ones, operation
from dtprof.formatting import list_ranks, plural

WHAT_IS_CALLED = "Compare what these ranks call at the lines named, and the arguments they pass."


def find_fingerprints(job: LoggedJob) -> Suspicion:
    """Return the mismatch that torch's debug wrapper reported, and its caveats."""
    prints, empty = _by_rank(job.facts.fingerprints)
    if not prints or _raised_before(job):
        return None
    if len(prints) == 1:
        if empty & set(job.own):
            return None  # the peer sent nothing, as it had failed
        only = next(iter(prints.values()))
        if empty:
            return _lone(only, job, f"nothing had come from {list_ranks(sorted(empty))}: zeros are no operation")
        said = f"rank {only.rank} reports a mismatch in {_words(only)}, and no peer's side of it is in the log"
        return _lone(only, job, said)
    aspects: tuple[tuple[str, str, Callable[[Fingerprint], Hashable]], ...] = (
        (
            "collective-order-mismatch",
            "different operations",
            lambda fingerprint: operation(fingerprint.op) or fingerprint.op,
        ),
        ("dtype-mismatch", "different element types", lambda fingerprint: fingerprint.dtype),
        ("size-mismatch", "different shapes", lambda fingerprint: fingerprint.shape),
    )
    for kind, words, value in aspects:
        values = {rank: value(fingerprint) for rank, fingerprint in prints.items()}
        if len(set(values.values())) > 1:
            return _mismatch(kind, words, values, prints, job, empty)
    sequence = {fingerprint.seq for fingerprint in prints.values() if fingerprint.seq is not None}
    if len(sequence) > 1:
        return (
            f"torch's debug wrapper gives {list_ranks(list(prints))} different sequence numbers of the same operation "
            f"({_words(next(iter(prints.values())))}): either a collective was skipped, or the wrapper counted wrongly "
            "(a known false alarm of barriers)"
        )
    return "torch's debug wrapper reports a mismatch whose sides look alike in the log"


def _raised_before(job: LoggedJob) -> bool:
    """Say whether an exception precedes the first report of a mismatch."""
    first = job.facts.fingerprints[0].order
    return any(trace.order < first for trace in job.own_traces)


def _by_rank(prints: Iterable[Fingerprint]) -> tuple[dict[int, Fingerprint], set[int]]:
    """Return the fingerprint of each rank, from itself or from a peer; and ranks whose data had not arrived."""
    own: dict[int, Fingerprint] = {}
    by_peers: dict[int, Fingerprint] = {}
    empty: set[int] = set()
    expected: dict[int | None, int] = {}
    for fingerprint in prints:
        if fingerprint.reported_by == fingerprint.rank:
            own.setdefault(fingerprint.rank, fingerprint)
            expected[fingerprint.rank] = fingerprint.seq or 0
    for fingerprint in prints:
        if fingerprint.reported_by == fingerprint.rank:
            continue
        if fingerprint.seq == 0 and fingerprint.shape is None and max(expected.values(), default=0) > 1:
            empty.add(fingerprint.rank)  # the wrapper prints zeros for a peer that sent nothing
        else:
            by_peers.setdefault(fingerprint.rank, fingerprint)
    return {**by_peers, **own}, empty


def _words(fingerprint: Fingerprint) -> str:
    parts = [operation(fingerprint.op) or fingerprint.op]
    parts += [f"shape [{fingerprint.shape}]"] if fingerprint.shape is not None else []
    parts += [fingerprint.dtype] if fingerprint.dtype else []
    return " ".join(parts)


def _mismatch(
    kind: str, words: str, values: dict[int, Hashable], prints: dict[int, Fingerprint], job: LoggedJob, empty: set[int]
) -> Finding:
    culprits = odd_ones(values)
    split = len(culprits) == len(values)
    others = [rank for rank in values if rank not in culprits]
    first = prints[culprits[0]]
    facts = [f"rank {rank}: {_words(fingerprint)}" for rank, fingerprint in sorted(prints.items())[:3]]
    if empty:
        facts.append(f"nothing had come from {list_ranks(list(empty))} to another rank: zeros were not compared")
    if split:
        facts.append("the ranks split into equal halves: which half is wrong is unknown")
    against = "" if split else f" than {list_ranks(others)}"
    return Finding(
        kind=kind,
        summary=f"{capitalised(culprits)} made {words}{against} at #{first.seq}: {_words(first)}"
        + f", against {_words(prints[others[0] if others else culprits[-1]])}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(others)),
        grade=0.45 if split else 0.85,  # both sides stand for the one that is wrong, which is a guess
        op=operation(first.op),
        seq=first.seq,
        call_sites=job.sites(others),
        culprit_call_sites=job.sites(list(culprits)),
        evidence=tuple(facts),
        advice=(WHAT_IS_CALLED,),
    )


def _lone(only: Fingerprint, job: LoggedJob, said: str) -> Finding:
    return Finding(
        kind="collective-order-mismatch",
        summary=f"Rank {only.rank} and a rank that is not named made operations that do not agree: {_words(only)}.",
        culprit_ranks=(),
        waiting_ranks=(only.rank,),
        grade=0.3,
        op=operation(only.op),
        seq=only.seq,
        call_sites=job.sites([only.rank]),
        advice=("Give the logs of all ranks: each reports its own side.",),
        leaves_open=(said,),
    )


def find_size_conflict(job: LoggedJob) -> Finding | None:
    """Return the finding for gloo's abort of ranks that received more bytes than they expected."""
    conflicts = job.notes("size-conflict")
    if not conflicts or job.own_traces:
        return None
    aborted = {rank for rank, end in job.exits.items() if end.status == -6}
    others = sorted(job.known - aborted) if len(aborted) > 1 else []
    odd = tuple(others) if len(others) == 1 else ()
    both = job.has_table and len(aborted) == 1 and len(job.known) == 2
    calls = {trace.call for trace in [*job.victims.values(), *job.victims_unknown]}
    split = any(call.startswith("all_to_all") for call in calls)
    ops = {op for call in calls if (op := operation(call))} - {"barrier"}
    who = f"; {list_ranks(odd)} did not abort" if odd else ""
    at = f" ({list_ranks(sorted(aborted))})" if aborted else ""
    return Finding(
        kind="split-size-mismatch" if split else "size-mismatch",
        summary=f"gloo stopped {plural(len(aborted), 'rank') if aborted else 'a rank'}{at} that received more bytes "
        f"than expected{who}.",
        culprit_ranks=tuple(sorted(job.known)) if both else odd,
        waiting_ranks=() if both else tuple(sorted(aborted)),
        grade=0.5,
        op=next(iter(ops)) if len(ops) == 1 else None,
        call_sites=job.sites(sorted(aborted)),
        culprit_call_sites=job.sites(job.known if both else list(odd)),
        evidence=(conflicts[0].text, *_two_that_differ(job, aborted, ops)),
        advice=(
            "Compare sizes, dtypes and split sizes that the ranks pass: TORCH_DISTRIBUTED_DEBUG=DETAIL prints them.",
        ),
    )


def _two_that_differ(job: LoggedJob, aborted: set[int], ops: set[str]) -> list[str]:
    """Say which two ranks differ, where one alone was stopped: of two both, in the ring of an all_reduce neighbours."""
    size = len(job.known)
    if not job.has_table or len(aborted) != 1 or size < 2:
        return []
    if size == 2:
        return ["of two ranks, which one is wrong is unknown"]
    (stopped,) = aborted
    sender = (stopped + 1) % size
    pair = f"rank {stopped} received from rank {sender}, and one of these two is wrong"
    return [f"in an all_reduce of all ranks {pair}"] if ops == {"all_reduce"} else []


def find_unfit_splits(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks whose own split sizes of an all_to_all gloo refused."""
    refused = {
        rank: trace
        for rank, trace in job.own.items()
        if OWN_CHECK.search(trace.message) and operation(trace.call) == "all_to_all"
    }
    if not refused or len(refused) < len(job.own_traces):
        return None
    culprits = tuple(sorted(refused))
    waiting = sorted(job.victims)
    return log_finding(
        job,
        "split-size-mismatch",
        f"{capitalised(culprits)} called all_to_all with split sizes that gloo refused.",
        culprits=culprits,
        waiting=waiting,
        grade=0.8,
        op="all_to_all",
        evidence=tuple(f"rank {rank}: {trace.message[:200]}" for rank, trace in sorted(refused.items())[:3]),
        advice=(
            "Compare the split sizes at this line: what a rank keeps for itself is equal in its input and its output.",
        ),
    )


def find_other_models(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks that gave DistributedDataParallel models that differ."""
    notes = job.notes("other-count", "other-shape")
    if not notes:
        return None
    counts: dict[int, Hashable] = {n.rank: n.number for n in notes if n.kind == "other-count" and n.rank is not None}
    differ = {note.rank for note in notes if note.kind == "other-shape" and note.rank is not None}
    if counts:
        odd = odd_ones(counts)
    else:  # each compares itself with rank 0: where all others differ, it may be the odd one
        others = job.known - {0}
        odd = (0,) if len(others) > 1 and differ >= others else tuple(sorted(differ))
    alike = tuple(sorted(set(counts) - set(odd)))
    return Finding(
        kind="size-mismatch",
        summary=f"{capitalised(odd)} gave DistributedDataParallel a model with other parameters"
        + (f" than {list_ranks(alike)}." if alike else "."),
        culprit_ranks=odd,
        waiting_ranks=alike,
        grade=0.85 if alike else 0.5,
        call_sites=job.sites(list(alike)),
        culprit_call_sites=job.sites(list(odd)),
        evidence=tuple(dict.fromkeys(note.text[:300] for note in notes[:3])),
        advice=("Build the model from the same configuration, and with the same torch, on every rank.",),
    )


def find_other_steps(job: LoggedJob) -> Finding | None:
    """Return the finding for ranks whose optimizer has made another number of steps, as FSDP sees when it saves."""
    notes = job.notes("other-step")
    odd = tuple(sorted({note.rank for note in notes if note.rank is not None}))
    if not odd:
        return None
    return log_finding(
        job,
        "step-mismatch",
        f"The optimizer of {list_ranks(odd)} has made another number of steps than those of the others.",
        culprits=odd,
        waiting=(),
        grade=0.7,
        evidence=(notes[0].text[:200],),
        advice=("Look for steps that only some ranks take: a shorter input, a step skipped for its loss, a resume.",),
    )


def find_nccl_mismatch(job: LoggedJob) -> Finding | None:
    """Return the finding for NCCL's own check of collectives."""
    sizes = job.notes("nccl-sizes")
    notes = job.notes("nccl-mismatch") or sizes
    if not notes or job.own_traces:
        return None
    ranks = tuple(sorted({rank for note in notes for rank in note.ranks}))
    at = f" at and around {list_ranks(ranks)}" if ranks else ""
    return Finding(
        kind="size-mismatch" if sizes else "collective-order-mismatch",
        summary=f"NCCL found collectives that do not agree{' in size' if sizes else ''}{at}.",
        culprit_ranks=ranks,
        grade=0.5,
        evidence=(notes[0].text,),
        advice=(WHAT_IS_CALLED,),
    )


RULES: Declared = (
    log_rule(find_fingerprints, ("collective-order-mismatch", "dtype-mismatch", "size-mismatch"), Stage.NAMED),
    log_rule(find_unfit_splits, ("split-size-mismatch",), Stage.NAMED),
    log_rule(find_other_models, ("size-mismatch",), Stage.NAMED),
    log_rule(find_other_steps, ("step-mismatch",), Stage.NAMED),
    log_rule(find_size_conflict, ("split-size-mismatch", "size-mismatch"), Stage.NAMED),
    log_rule(find_nccl_mismatch, ("size-mismatch", "collective-order-mismatch"), Stage.NAMED),
)
