"""Asynchronous operations whose handles are dropped, by one rank where its peers wait or by all, or awaited too late.

gloo completes operations in any order, and only a barrier of the group waits for those before it. On a device a stream
may wait for what no record shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtprof.columns import distinct
from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised, explain, group_words, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.intervals import Mask
from dtprof.job.group_collectives import group_tables
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import ChannelEnd, Operation
from dtprof.records import codes
from dtprof.records.sites import Site
from dtprof.records.tables import Array, EarlyUse, Group, join, select

RECEIVE_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
RECEIVE_MOST = (*RECEIVE_ALL, "broadcast")
"""Collectives that fill a buffer on every member."""
HANDED_OUT = ("broadcast", "reduce", "gather", "scatter", "isend", "irecv", "batch_isend_irecv")
"""Other functions that return a handle."""
_BARRIER = crc32(b"barrier")
MIN_STEPS = 2
"""Steps in which the same handles of a line must be dropped to count where others of it are waited for."""
MAX_PEERS = 8
"""Members that a rank is compared with: a thousand with a thousand would take minutes."""


@dataclass(frozen=True, kw_only=True)
class _Dropped:
    """Handles of a line that a rank dropped."""

    group: GroupId
    operation: Operation  # the first of them
    count: int
    waiting: tuple[int, ...] = ()  # ranks that wait for theirs there


def find_unwaited(case: Case) -> list[Finding]:
    """Return a finding for each line at which a rank dropped handles that other ranks wait for at that line."""
    job = case.job
    found: dict[Site | None, dict[int, _Dropped]] = {}
    for group, tables in group_tables(job.ranks).items():
        for rank, table in tables.items():
            others = dict(islice(((r, other) for r, other in tables.items() if r != rank), MAX_PEERS))
            for operation, count, waiting in _dropped(job, group, rank, table, others):
                dropped = _Dropped(group=group, operation=operation, count=count, waiting=waiting)
                found.setdefault(operation.site, {}).setdefault(rank, dropped)
    early = _find_early_uses(job)
    used = set().union(*map(_sites, early))
    by_some = [_finding(job, dropped) for site, dropped in found.items() if site not in used]
    known = used | found.keys()
    return [*early, *by_some, *(finding for finding in _find_dropped_by_all(job) if not known & _sites(finding))]


def _find_early_uses(job: JobState) -> list[Finding]:
    """Return a finding for each pair of lines: of an operation's call, and of a use of its buffer before the wait."""
    lines: dict[tuple[Site, Site | None], dict[int, EarlyUse]] = {}
    for rank in job.ranks.values():
        for use in rank.early_uses:
            if use.site is not None and _is_own_call(use.site):
                lines.setdefault((use.site, use.used), {}).setdefault(rank.rank, use)
    return [_finding_of_use(uses) for uses in lines.values()]


def _is_own_call(site: Site) -> bool:
    """Say whether the program itself asked for the handle: handles of a library are its own business."""
    return site.label is None and (not site.api or site.api.startswith((*RECEIVE_ALL, *HANDED_OUT)))


def _finding_of_use(uses: dict[int, EarlyUse]) -> Finding:
    """Return the finding for a pair of lines, from the first use on each rank."""
    ranks = tuple(sorted(uses))
    first = uses[ranks[0]]
    what = f"{first.op} #{first.seq} of {group_words(first.group)}{at_line(first.site)}"
    are_reads = {use.use == "read" for use in uses.values()}
    verb = " or ".join("is read" if is_read else "is written to" for is_read in sorted(are_reads, reverse=True))
    harm = "what is read may not be there yet" if are_reads == {True} else "what is sent or received may be damaged"
    if first.dropped:
        fate = "its handle had been dropped without a wait"
    elif first.waited:
        fate = "the program waited for its handle only afterwards"
    else:
        fate = "the program had not waited for its handle"
    seen = f"{first.by} took the tensor{at_line(first.used)}" if first.by else "the version of the tensor had changed"
    return Finding(
        kind="unwaited-async",
        summary=f"The buffer of {what} {verb}{at_line(first.used)} before its wait on {list_ranks(ranks)}: {harm}.",
        culprit_ranks=ranks,
        grade=0.9,
        group=first.group,
        op=first.op,
        seq=first.seq,
        step=first.step,
        call_sites={rank: use.used for rank, use in uses.items() if use.used is not None},
        culprit_call_sites={rank: use.site for rank, use in uses.items() if use.site is not None},
        evidence=(f"{seen}; {fate}",),
        advice=(
            "Call wait() on the handle before the buffer is used, or use another buffer meanwhile.",
            *(() if first.by else ("Run it once with dtprof run --check handles, which names the line of the use.",)),
        ),
    )


def explain_late_death(case: Case, late: Finding) -> list[Finding]:
    """Return why a rank died when its program had ended: backends abort where operations are still going on."""
    dropped = [f for f in case.findings(find_unwaited) if set(late.culprit_ranks) <= set(f.culprit_ranks)]
    return [explain(dropped[0], late), *dropped[1:]] if dropped else []


def find_dropped_receives(case: Case) -> Iterator[Finding]:
    """Give the findings of ranks that have ended: others may wait for their receives yet."""
    return (f for f in _find_dropped_receives(case.job) if case.job.ranks[f.culprit_ranks[0]].finished)


def explain_stall(case: Case, stall: Finding) -> Iterator[Finding]:
    """Give why an operation does not complete that all entered: receives were dropped on its connections before."""
    for dropped in _find_dropped_receives(case.job, at_least=1)[:1]:
        yield explain(replace(dropped, waiting_ranks=stall.waiting_ranks), stall)


def explain_exit_by_unwaited_send(case: Case, exited: Finding) -> Iterator[Finding]:
    """Give the sends of ranks that ended, which others wait for: what has not left when a process ends is lost."""
    job, gone = case.job, set(exited.culprit_ranks)
    for rank in exited.waiting_ranks:
        for wait in job.waits.get(rank, ()):
            receive = wait.operation
            if not receive.p2p or receive.peer_rank not in gone or wait.any_of_them:
                continue
            sender = job.ranks[receive.peer_rank]
            send = _find_send_let_go(sender, receive, rank) if sender.sees_questions else None
            if send is not None:
                yield explain(_finding_of_send(job.group(send.group), sender, send, receive, rank), exited)
                return


def _find_send_let_go(sender: RankState, receive: Operation, receiver: int) -> Operation | None:
    """Return the send of a message that is waited for, where nothing was done with its handle."""
    end = ChannelEnd(group=receive.group, peer=receiver, tag=receive.tag, sends=True)
    table = sender.messages.get(end)
    if table is None:
        return None
    at = np.flatnonzero((table["nth"] == receive.nth) & table["plain"] & ~table["settled"])
    send = sender.operations[int(table["at"][at[0]])] if len(at) else None
    return send if send is not None and send.site is not None and send.site.label is None else None


def _finding_of_send(group: Group, sender: RankState, send: Operation, receive: Operation, receiver: int) -> Finding:
    return Finding(
        kind="unwaited-async",
        summary=f"Rank {sender.rank} ended without a wait for its send to rank {receiver}{at_line(send.site)}; "
        f"{wait_words((receiver,))} for the message{at_line(receive.site)}.",
        culprit_ranks=(sender.rank,),
        waiting_ranks=(receiver,),
        grade=0.85,
        group=group,
        op=send.op,
        seq=send.seq,
        step=send.step,
        call_sites=call_sites({receiver: receive}),
        culprit_call_sites=call_sites({sender.rank: send}),
        evidence=("its handle was neither waited for nor asked for completion: what has not left by then is lost",),
        advice=("Call wait() on what isend returns before the program ends.",),
    )


def _find_dropped_receives(job: JobState, at_least: int = 2) -> list[Finding]:
    """Return a finding for each line at which a rank received several messages and never waited for one.

    Where gloo's handle of a receive is dropped, the message may be lost, and what follows on that connection with it.
    """
    findings = []
    for rank in job.ranks.values():
        for operations in _receives_let_go(rank) if rank.sees_questions else ():
            group = job.group(operations[0].group)
            if len(operations) >= at_least and "gloo" in (group.backend or ""):
                findings.append(_finding_of_receives(group, rank, operations))
    return findings


def _receives_let_go(rank: RankState) -> list[list[Operation]]:
    """Return the receives of each line of the program of which none is waited for, asked about or seen to end."""
    lines: dict[Site, list[Array]] = {}
    for channel, table in rank.messages.items():
        for number in distinct(table["site"][table["plain"]]).tolist() if not channel.sends else ():
            own = select(table, table["plain"] & (table["site"] == number))
            site = rank.operations[int(own["at"][0])].site
            if site is not None and site.label is None:
                lines.setdefault(site, []).append(own)
    let_go = [np.sort(join(parts)["at"]) for parts in lines.values() if not any(own["settled"].any() for own in parts)]
    return [[rank.operations[at] for at in rows.tolist()] for rows in sorted(let_go, key=lambda rows: int(rows[0]))]


def _finding_of_receives(group: Group, rank: RankState, operations: list[Operation]) -> Finding:
    first, senders = operations[0], sorted({operation.peer_rank for operation in operations} - {-1})
    return Finding(
        kind="unwaited-async",
        summary=f"Rank {rank.rank} never waited for what it receives from "
        f"{list_ranks(senders) if senders else 'others'}{at_line(first.site)}, {_times(len(operations))}: the buffer "
        "may be used before the message is there.",
        culprit_ranks=(rank.rank,),
        grade=0.8 if rank.finished else 0.6,
        evidence_class=Evidence.DIRECT if rank.finished else None,
        group=group,
        op=first.op,
        seq=first.seq,
        step=first.step,
        culprit_call_sites=call_sites({rank.rank: first}),
        evidence=("the handles were neither waited for nor asked for completion",),
        advice=("Call wait() on what irecv returns before the buffer is used, and keep it until then.",),
    )


def _sites(finding: Finding) -> set[object]:
    return set(finding.culprit_call_sites.values())


def _find_dropped_by_all(job: JobState) -> list[Finding]:
    """Return a finding for each line at which no rank of a group did anything with the handles."""
    lines: dict[int, dict[int, _Dropped]] = {}  # one line may serve a group of each row of a mesh
    for group, tables in group_tables(job.ranks).items():
        if "gloo" not in (job.group(group).backend or "") or len(tables) < len(group.ranks):
            continue
        here: dict[int, dict[int, _Dropped]] = {}
        for rank, table in tables.items():
            if job.ranks[rank].sees_questions:
                for place, (first, count) in _left_alone(job, rank, table).items():
                    dropped = _Dropped(group=group, operation=first, count=count)
                    here.setdefault(place, {})[rank] = dropped
        for place, own in here.items():
            if len(own) == len(tables):
                lines.setdefault(place, {}).update(own)
    return [_finding_of_all(job, own) for own in lines.values()]


def _left_alone(job: JobState, rank: int, table: Array) -> dict[int, tuple[Operation, int]]:
    """Return by place of the program the first operation of which the handle was dropped, and how many there were.

    It was, where neither a wait nor a question ever came, nor a barrier before the step, or the program, ended.
    """
    collectives = job.ranks[rank].collectives
    unused = (table["flags"] & (codes.ASYNC | codes.ASKED | codes.DEVICE)) == codes.ASYNC
    unused &= (table["waits"] == 0) & (table["line"] != 0) & (table["state"] != codes.FAILED)
    let_go = {}
    for line in distinct(table["line"][unused]).tolist():
        here = np.flatnonzero(table["line"] == line)
        if not unused[here].all() and not _are_some_of_each_step(table["step"][here], unused[here]):
            continue
        here = here[unused[here]]
        ends, covered = _ends_of_steps(table, here)
        open_ended = (ends == len(table)) & (not job.ranks[rank].finished)
        dropped = here[~covered & ~open_ended]
        operation = collectives.operation(int(table["row"][here[0]]))
        if len(dropped) and operation.op in RECEIVE_MOST and _is_of_the_program(operation):
            let_go[line] = collectives.operation(int(table["row"][dropped[0]])), len(dropped)
    return let_go


def _ends_of_steps(table: Array, here: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """Return where the step of each place ends, and whether a barrier comes before, which waits for all."""
    barriers = np.flatnonzero(table["op"] == _BARRIER)
    ends = np.searchsorted(table["step"], table["step"][here], side="right")
    return ends, np.searchsorted(barriers, here) < np.searchsorted(barriers, ends)


def _rows_let_go_in_a_round(table: Array, line: int) -> npt.NDArray[np.int64]:
    """Return the rows of calls of a line before one of the same round that was waited for: calls in a row, in one step.

    As where handles are kept by a key that two of them share: who waits for some of a round needs the others, too.
    """
    here = np.flatnonzero(table["line"] == line)
    rounds = np.cumsum(np.diff(here, prepend=-1) + np.diff(table["step"][here], prepend=table["step"][here[0]]) != 1)
    waited = table["waits"][here] > 0
    newest = np.full(int(rounds[-1]) + 1, -1)
    np.maximum.at(newest, rounds[waited], here[waited])
    _, covered = _ends_of_steps(table, here)
    rows: npt.NDArray[np.int64] = table["row"][here[(here < newest[rounds]) & ~covered]]
    return rows


def _are_some_of_each_step(steps: npt.NDArray[np.int64], unused: Mask) -> bool:
    """Say whether of the handles of one line the same ones are dropped in each step, and others are waited for.

    As where a list of handles is begun anew for each layer. The newest step may not be over. Where the program makes no
    steps, those up to one that is waited for are a round.
    """
    ends = np.diff(steps) != 0
    parts = np.split(unused, np.flatnonzero(ends if ends.any() else ~unused[:-1]) + 1)[:-1]
    return len(parts) >= MIN_STEPS and bool(parts[0].any()) and all(np.array_equal(part, parts[0]) for part in parts)


def _is_of_the_program(operation: Operation) -> bool:
    """Say whether the program itself made the call: handles of a library are its own business."""
    site = operation.site
    return site is not None and site.label is None and site.api.startswith(RECEIVE_MOST)


def _finding_of_all(job: JobState, dropped: dict[int, _Dropped]) -> Finding:
    known = job.group(dropped[min(dropped)].group)
    first, count = dropped[min(dropped)].operation, dropped[min(dropped)].count
    return Finding(
        kind="unwaited-async",
        summary=f"No rank waited for {first.op} #{first.seq} of {group_words(known)}{at_line(first.site)}, "
        f"nor for others of that line, {_times(count)} in all: what it fills may be used before it is there.",
        culprit_ranks=tuple(sorted(dropped)),
        grade=0.8,
        evidence_class=Evidence.DIRECT,
        group=known,
        op=first.op,
        seq=first.seq,
        step=first.step,
        culprit_call_sites=call_sites({rank: own.operation for rank, own in dropped.items()}),
        evidence=(
            "its handle was neither waited for nor asked for completion, and no barrier came before the step ended",
        ),
        advice=("Call wait() on the handle before the buffer is used.",),
    )


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


def _dropped(
    job: JobState, group: GroupId, rank: int, table: Array, others: dict[int, Array]
) -> list[tuple[Operation, int, tuple[int, ...]]]:
    """Return operations never waited for, the first of each line, how often, and who waits there."""
    collectives = job.ranks[rank].collectives
    sees_all = job.ranks[rank].sees_questions and "gloo" in (job.group(group).backend or "")
    is_async = (table["flags"] & codes.ASYNC) != 0
    # The newest may be waited for yet; in a job that goes on, all of its step.
    open_ended = table["row"] >= table["row"][-1]
    if job.goes_on(job.ranks[rank]):
        open_ended |= table["step"] >= table["step"][-1]
    asked = (table["flags"] & codes.ASKED) != 0
    mine = table[is_async & ~asked & (table["waits"] == 0) & (table["line"] != 0) & ~open_ended]
    results = []
    for place in distinct(mine["line"]):
        here = mine[mine["line"] == place]
        # A line at which this rank waits sometimes may wait by other means (is_completed) at other times, unless it
        # stopped to wait for good.
        waited = table["row"][(table["line"] == place) & (table["waits"] > 0)]
        if len(waited) and (len(here) < MIN_STEPS or here["row"][0] < waited.max()):
            here = here[np.isin(here["row"], _rows_let_go_in_a_round(table, place))] if sees_all else here[:0]
            if not len(here):
                continue
        operation = collectives.operation(int(here["row"][0]))
        # Of a broadcast only the root may go on before it has ended.
        is_received = operation.op in RECEIVE_ALL or (operation.op == "broadcast" and not _is_root(rank, here, job))
        if not is_received or operation.site is None or operation.site.label is not None:
            continue
        waiting = tuple(sorted(r for r, other in others.items() if _waits_there(other, here)))
        # A line that few ranks wait at may be right without a wait, which these make for reasons of their own.
        if 2 * len(waiting) >= len(others) and waiting:
            results.append((operation, len(here), waiting))
    return results


def _is_root(rank: int, rows: Array, job: JobState) -> bool:
    """Say whether a rank is the root of one of its calls, or their roots are not known."""
    roots = (job.ranks[rank].collectives.operation(int(row)).peer_rank for row in rows["row"])
    return any(root in (rank, -1) for root in roots)


def _waits_there(other: Array, here: Array) -> bool:
    """Say whether another rank made the same calls at the same line, and waited for all of them."""
    rows = other[np.isin(other["seq"], here["seq"]) & (other["line"] == here["line"][0])]
    return len(rows) == len(here) and bool((rows["waits"] > 0).all())


def _finding(job: JobState, dropped: dict[int, _Dropped]) -> Finding:
    culprits = tuple(sorted(dropped))
    first = dropped[culprits[0]]
    known, operation, named = job.group(first.group), first.operation, list_ranks(culprits)
    waiting = tuple(sorted({rank for own in dropped.values() for rank in own.waiting}.difference(culprits)))
    return Finding(
        kind="unwaited-async",
        summary=f"{capitalised(culprits)} never waited for {operation.op} #{operation.seq} of {group_words(known)}"
        f"{at_line(operation.site)}, {_times(first.count)}: what it fills may be used before it is there.",
        culprit_ranks=culprits,
        grade=0.85,
        group=known,
        op=operation.op,
        seq=operation.seq,
        step=operation.step,
        culprit_call_sites=call_sites({rank: own.operation for rank, own in dropped.items()}),
        evidence=(f"{wait_words(waiting)} for the handle at the same line, {named} did not",),
        advice=("Call wait() on the handle on every rank before the buffer is used.",),
    )


KINDS = ("unwaited-async",)
RULES: Declared = (
    Rule(kinds=KINDS, stages=(Stage.RISK,), find=find_unwaited),
    Rule(kinds=KINDS, stages=(Stage.RISK,), find=find_dropped_receives),
    Refinement(kinds=KINDS, causes=("rank-killed",), stages=(Stage.LATE,), refine=explain_late_death),
    Refinement(kinds=KINDS, causes=("backend-stall",), stages=(Stage.STALL,), refine=explain_stall),
    Refinement(kinds=KINDS, causes=("rank-exited",), stages=(Stage.WAIT,), refine=explain_exit_by_unwaited_send),
)
