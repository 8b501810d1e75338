"""A rank left its program with status 0 while others wait for it."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import call_sites, first_blocking_of, last_sites_of, operation_words, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_branches import find_exit
from dtprof.diagnosis.findings import ONLY_BRANCH, Evidence, Finding, at_line, capitalised, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.open_collectives import operation_at
from dtprof.diagnosis.rank_failures import exit_finding
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.wait_graph import absent_members
from dtprof.records.nodes.exit_records import is_stop
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS

TO_THE_END_NS = 1_000_000_000
"""Between the end of a program's connections and that of its interpreter."""


def find_exited(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that left with status 0 while others wait for them."""
    job, culprits = case.job, case.awaited_leavers
    if not culprits or _were_never_to_send(case):
        return
    last = last_sites_of(job.ranks[rank] for rank in culprits)
    ways = _loop_exits(job, culprits)
    steps = {rank: job.ranks[rank].steps for rank in culprits}
    made = {rank: f" after {plural(count, 'step')}" if count is not None else "" for rank, count in steps.items()}
    yield exit_finding(
        "rank-exited",
        f"{capitalised(culprits)} exited with status 0",
        culprits,
        last | ways,
        job,
        grade=0.95,
        evidence_class=Evidence.DIRECT,
        evidence=(
            *(
                f"rank {rank}: exited without an error{after}; its last record is{at_line(last.get(rank))}"
                for rank, after in made.items()
            ),
            *(f"rank {rank} may have left{at_line(site)}: {ONLY_BRANCH}" for rank, site in ways.items()),
        ),
        advice=(
            "Every rank must make the same collectives: look for an early return, break or exit, "
            "or for fewer batches on that rank.",
        ),
    )


def _loop_exits(job: JobState, culprits: tuple[int, ...]) -> dict[int, Site]:
    """Return the lines by which ranks may have left, of those that called neither sys.exit nor os._exit."""
    waiting = first_blocking_of(job, victims(job, set(culprits)))
    unmarked = [rank for rank in culprits if job.ranks[rank].left_at is None]
    return {rank: site for rank in unmarked if (site := find_exit(job, job.ranks[rank], waiting)) is not None}


def _were_never_to_send(case: Case) -> bool:
    """Say whether ranks wait for those that left only in messages such as had never gone between them before.

    Then the program never was to send them, which is p2p-unmatched; after others, the rank left too early.
    """
    gone = set(case.awaited_leavers)
    blocked = [wait for waits in case.job.waits.values() for wait in waits if gone.intersection(wait.awaited)]
    # A receive from any source names no message in particular.
    return any(not wait.any_of_them for wait in blocked) and all(
        wait.operation.p2p and wait.operation.nth == 0 for wait in blocked
    )


def find_left_alone(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that ended in order before others lost their connection to a peer.

    For records that do not show in which operation those others were: the last thing to look for.
    """
    job = case.job
    errors = (rank.transport_exception for rank in job.ranks.values())
    lost = [error.t_ns for error in errors if error is not None and error.t_ns != UNKNOWN_NS]
    gone = tuple(
        sorted(
            rank.rank
            for rank in job.ranks.values()
            if lost and rank.finished and rank.ended_ns != UNKNOWN_NS and rank.ended_ns <= min(lost) + TO_THE_END_NS
        )
    )
    if not gone or is_stop(job.manifest.exit_status):
        return
    sites = last_sites_of(job.ranks[rank] for rank in gone)
    yield exit_finding(
        "rank-exited",
        f"{capitalised(gone)} exited with status 0, and others lost a peer then",
        gone,
        sites,
        job,
        grade=0.7,
        evidence=tuple(
            f"rank {rank.rank} lost its peer{at_line(error.frame)}: {error.type}"
            for rank in job.ranks.values()
            if (error := rank.transport_exception) is not None
        ),
        advice=("Every rank must make the same collectives: look for an early return, break or exit on that rank.",),
    )


def find_left_in_caught_failure(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that ended in order before collectives, which failed for it in the others.

    Where the others caught what was raised, the job ends with status 0, and looks sound.
    """
    job = case.job
    failed = [o for rank in job.ranks.values() for o in rank.open_operations if o.failed and not o.p2p]
    for operation in sorted(failed, key=lambda operation: operation.issued_ns):
        absent = absent_members(job.ranks, operation.group, operation.seq, lost=())
        gone = tuple(rank for rank in absent if job.ranks[rank].finished)
        if not gone or gone != absent:
            continue
        waiting = {
            rank.rank: own
            for rank in job.ranks.values()
            if rank.rank not in gone and (own := operation_at(rank, operation.group, operation.seq)) is not None
        }
        group = job.group(operation.group)
        sites = last_sites_of(job.ranks[rank] for rank in gone)
        yield Finding(
            kind="rank-exited",
            summary=f"{capitalised(gone)} ended before {operation_words(job, operation)}, which failed on "
            f"{list_ranks(tuple(waiting))}; the exception was caught there, and the job went on.",
            culprit_ranks=gone,
            grade=0.85,
            group=group,
            op=operation.op,
            seq=operation.seq,
            step=operation.step,
            call_sites=call_sites(waiting),
            culprit_call_sites=sites,
            evidence=tuple(
                f"rank {rank} made {plural(job.ranks[rank].counts.get((operation.group, False), 0), 'collective')} of "
                f"{group_words(group)}, the others at least {operation.seq + 1}"
                for rank in gone[:4]
            ),
            advice=(
                "Every rank must make the same collectives: look for a skipped call or fewer batches on that rank.",
            ),
        )
        return


RULES: Declared = (
    Rule(kinds=("rank-exited",), stages=(Stage.WAIT,), find=find_exited),
    Rule(kinds=("rank-exited",), stages=(Stage.LATE,), find=find_left_alone),
    Rule(kinds=("rank-exited",), stages=(Stage.RISK,), find=find_left_in_caught_failure),
)
