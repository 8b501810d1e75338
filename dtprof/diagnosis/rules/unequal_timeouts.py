"""Members or groups give up after different times: a warning where one gave up on a rank on its way, else a note."""

from collections.abc import Iterator

from dtprof.diagnosis.absent_ranks import progress_of
from dtprof.diagnosis.blocked_ranks import call_sites, operation_words, places_held_by
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rank_failures import TOO_LATE
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.axes import is_default
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.tables import UNKNOWN_NS

NEARLY = 0.9
"""Of its limit that a wait lasted, to have been ended by it."""
DEFAULT_TIMEOUTS_S = (600.0, 1800.0)
"""Default timeouts of groups in torch, on NCCL and elsewhere."""


def find_hasty_rank(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks whose shorter limit ended the job while those they waited for were on their way."""
    job = case.job
    for key, limits in _limits(job).items():
        given_up = {
            rank: operation
            for rank in limits
            if (operation := _given_up(job.ranks[rank], key)) is not None
            and limits[rank] < max(limits.values())
            and operation.done_ns - operation.issued_ns >= NEARLY * limits[rank] * 1e9
        }
        if not given_up:
            continue
        first = min(given_up.values(), key=lambda operation: operation.done_ns)
        culprits = tuple(rank for rank, operation in sorted(given_up.items()) if operation.seq == first.seq)
        came = {r.rank: _issued(r, first) for r in job.ranks.values() if r.rank in key.ranks}
        late = tuple(rank for rank, own_ns in came.items() if own_ns is None or own_ns > first.done_ns)
        if late and all(came[rank] is not None or _was_at_work(job.ranks[rank]) for rank in late):
            yield _hasty_finding(job, key, first, culprits, late, limits)


def _given_up(rank: RankState, key: GroupId) -> Operation | None:
    """Return the collective of a group that the rank's own limit ended, and its program with it."""
    error = rank.exceptions[-1] if rank.exceptions else None
    last = rank.operations[-1] if rank.operations else None
    if error is None or last is None or last.p2p or last.group != key or not last.failed or last.done_ns == UNKNOWN_NS:
        return None
    return last if TOO_LATE in error.message else None


def _issued(rank: RankState, place: Operation) -> int | None:
    """Return when a rank issued the collective at this position of the group; None where it has not."""
    same = (o.issued_ns for o in rank.operations if (o.group, o.seq, o.p2p) == (place.group, place.seq, False))
    return next(same, None)


def _was_at_work(rank: RankState) -> bool:
    ended_by = -rank.exit.status if rank.exit is not None else 0
    computed = rank.crash is not None and rank.crash.computes and rank.crash.signal == ended_by
    return computed or bool(progress_of(rank))


def _hasty_finding(
    job: JobState,
    key: GroupId,
    first: Operation,
    culprits: tuple[int, ...],
    late: tuple[int, ...],
    limits: dict[int, float],
) -> Finding:
    mine, most = limits[culprits[0]], max(limits.values())
    known = job.group(key)
    places = places_held_by(job.ranks[rank] for rank in late)
    waiting = {
        r: o for r in key.ranks if r not in (*culprits, *late) and (o := _operation_at(job, r, first)) is not None
    }
    return Finding(
        kind="unequal-timeouts",
        severity="warning",
        summary=f"{capitalised(culprits)} gave up on {list_ranks(late)} in {operation_words(job, first)} after "
        f"{mine:,.0f} s, a limit that other members do not have ({most:,.0f} s); {list_ranks(late)} "
        f"{'was' if len(late) == 1 else 'were'} on the way, and the job ended.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(waiting)),
        grade=0.8,
        group=known,
        op=first.op,
        seq=first.seq,
        step=first.step,
        call_sites=call_sites(waiting) | places,
        culprit_call_sites=call_sites(dict.fromkeys(culprits, first)),
        evidence=tuple(
            f"rank {rank} was at work{at_line(places.get(rank))}"
            if _issued(job.ranks[rank], first) is None
            else f"rank {rank} came after that"
            for rank in late[:8]
        ),
        advice=("Pass the same timeout on every rank, longer than the longest work that one of them does alone.",),
    )


def _operation_at(job: JobState, rank: int, place: Operation) -> Operation | None:
    operations = job.ranks[rank].operations if rank in job.ranks else ()
    return next((o for o in operations if (o.group, o.seq, o.p2p) == (place.group, place.seq, False)), None)


def _limits(job: JobState) -> dict[GroupId, dict[int, float]]:
    """Return the limits of each group by member, as far as known."""
    limits: dict[GroupId, dict[int, float]] = {}
    for rank in job.ranks.values():
        for key, group in rank.groups.items():
            if group.timeout_s is not None:
                limits.setdefault(key, {})[rank.rank] = group.timeout_s
    return limits


def find_unequal_timeouts(case: Case) -> Iterator[Finding]:
    """Give a note for each group whose members give up after different times."""
    job = case.job
    for key, limits in _limits(job).items():
        if len(set(limits.values())) > 1:
            least, most = min(limits.values()), max(limits.values())
            first = tuple(sorted(rank for rank, limit in limits.items() if limit == least))
            known = job.group(key)
            yield Finding(
                kind="unequal-timeouts",
                severity="info",
                summary=f"Operations of {group_words(known)} may take {least:,.0f} s on {list_ranks(first)}, and up to "
                f"{most:,.0f} s on its other members.",
                culprit_ranks=first,
                grade=0.9,
                group=known,
                advice=("Pass the same timeout on every rank.",),
            )


def find_short_timeouts(case: Case) -> Iterator[Finding]:
    """Give a note where groups have torch's own limit, and the default group a longer one: they do not inherit it."""
    known = {key: group for rank in case.job.ranks.values() for key, group in rank.groups.items()}
    limits = [g.timeout_s for g in known.values() if is_default(g) and g.timeout_s is not None]
    if not limits:
        return
    short = [
        group
        for group in known.values()
        if not is_default(group) and group.timeout_s in DEFAULT_TIMEOUTS_S and group.timeout_s < limits[0]
    ]
    if short:
        words = group_words(short[0]) + (f" and {len(short) - 1} more" if len(short) > 1 else "")
        yield Finding(
            kind="unequal-timeouts",
            severity="info",
            summary=f"Operations of {words} may take {short[0].timeout_s:,.0f} s, those of the default group "
            f"{limits[0]:,.0f} s: new_group does not take over its limit.",
            culprit_ranks=(),
            grade=0.9,
            group=short[0],
            advice=("Pass timeout to new_group, too.",),
        )


RULES: Declared = (
    Rule(kinds=("unequal-timeouts",), stages=(Stage.WAIT,), find=find_hasty_rank),
    Rule(kinds=("unequal-timeouts",), stages=(Stage.RISK,), find=find_unequal_timeouts),
    Rule(kinds=("unequal-timeouts",), stages=(Stage.RISK,), find=find_short_timeouts),
)
