"""A store, a rendezvous or the creation of a communicator timed out in a log: ranks did not join."""

import re

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.log_findings.log_rule import Suspicion, log_finding, log_rule
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.log_facts import Note
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob

BARRIER_NUMBER = re.compile(r"store_based_barrier_key:(\d{1,6})")
ASKING_RANK = re.compile(r"\[(\d{1,7})\] is setting up NCCL communicator")
LAST_NUMBER = re.compile(r"keys: .*?/(\d{1,7})\s*(?:[\])(,.]|$)")
STARTED = "Check that every rank was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."


def find_never_joined(job: LoggedJob) -> Suspicion:
    """Return the finding for ranks that a store or rendezvous waited for."""
    notes = job.notes("store-key", "store-barrier", "store-clients", "store-unreachable", "rendezvous")
    if not notes:
        return _find_no_communicator(job)
    reporters = {note.rank for note in notes if note.rank is not None}
    keys = {int(found[1]) for note in notes if note.kind == "store-key" and (found := LAST_NUMBER.search(note.text))}
    sizes = {note.number for note in notes if note.number} or ({job.facts.world_size} - {0})
    missing = keys - reporters
    counts = {note.ranks[0] for note in notes if note.kind in ("store-barrier", "store-clients") and note.ranks}
    if not missing and len(sizes) == 1 and reporters:
        silent = set(range(min(sizes | {100_000}))) - reporters
        num_missing = next(iter(sizes)) - max(counts, default=len(reporters))
        missing = silent if len(silent) == num_missing else set()
    culprits = tuple(sorted(missing))
    too_many = [note for note in notes if note.kind == "store-barrier" and note.ranks and note.ranks[0] > note.number]
    what = notes[0].text
    return Finding(
        kind="group-creation-mismatch" if _of_later_group(notes) else "rank-never-joined",
        summary=f"{capitalised(culprits) if culprits else 'Some ranks'} never joined: "
        + ("a store still counts ranks of an earlier attempt." if too_many else "the store or rendezvous timed out."),
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(reporters)),
        grade=0.65 if culprits and not too_many else 0.35,
        evidence=(what[:300],),
        advice=(STARTED,),
        leaves_open=() if culprits else ("which rank did not join is not in the log",),
    )


def _of_later_group(notes: list[Note]) -> bool:
    """Say whether the barrier is that of a group made after the default one: the first has the number 1."""
    numbers = {int(found[1]) for note in notes if (found := BARRIER_NUMBER.search(note.text))}
    return bool(numbers) and min(numbers) > 1


def _find_no_communicator(job: LoggedJob) -> Suspicion:
    """Return the finding for a rank that the others asked in vain for the name of a new communicator."""
    notes = job.notes("nccl-id")
    if not notes:
        return None
    asking = {note.rank: int(found[1]) for note in notes if (found := ASKING_RANK.search(note.text))}
    same = bool(asking) and all(rank == in_group for rank, in_group in asking.items())
    culprits = tuple(sorted({rank for note in notes for rank in note.ranks} - set(asking))) if same else ()
    waiting = tuple(sorted(rank for rank in asking if rank is not None))
    return log_finding(
        job,
        "rank-skipped-collective",
        f"{capitalised(culprits) if culprits else 'The first member of a group'} never came to the group's "
        "first operation: the others waited for the name of the communicator.",
        culprits=culprits,
        waiting=waiting,
        grade=0.55 if culprits else 0.3,
        evidence=(notes[0].text[:300],),
        advice=("Look at what the first rank of the group does before the operation that the others wait in.",),
        leaves_open=() if culprits else ("ranks are those of a group, which global ranks they are is not in the log",),
    )


RULES: Declared = (
    log_rule(find_never_joined, ("rank-never-joined", "group-creation-mismatch", "rank-skipped-collective")),
)
