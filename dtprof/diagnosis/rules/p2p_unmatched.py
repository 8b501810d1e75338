"""A rank waits for a message of which the peer never posts the other end."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall, frames_of
from dtprof.diagnosis.divergence.skip_branches import find_branches_past, find_branches_past_iteration, operation_before
from dtprof.diagnosis.findings import ONLY_BRANCH, Evidence, Finding, at_line, capitalised, explain, skip_evidence
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.p2p_messages import message_finding, message_words
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.issued_operations import ChannelEnd, Operation
from dtprof.job.iteration_pattern import find_departures, left_out_of_round, usual_operation
from dtprof.job.wait_graph import Wait, find_expecting, went_astray
from dtprof.lint.program_order import BranchKind

CALLS = {
    "send": frozenset({"send", "isend", "send_object_list", "batch_isend_irecv"}),
    "receive": frozenset({"recv", "irecv", "recv_object_list", "batch_isend_irecv"}),
}
"""Functions that make either end of a message."""
MAX_ASKED = 64
"""Messages, those waited for longest, whose peers' own patterns are looked at."""


def find_unmatched(case: Case) -> Iterator[Finding]:
    """Give findings for messages whose other end its peer does not post: it waits elsewhere, or has ended.

    A rank that turns to a peer as never before while another waits for it went astray itself: it is heard last, and
    those that wait for it first. Those who wait for a rank that waits for such a message itself come after it.
    """
    job, unmet, waits = case.job, case.unmet_messages, case.job.waits
    astray = {wait.rank for wait in unmet if went_astray(job.ranks, wait)}
    held = {wait.rank for wait in unmet} - astray

    def by_cause(wait: Wait) -> tuple[bool, bool, bool]:
        return wait.rank in astray, not astray & {*wait.awaited}, bool(held & {*wait.awaited})

    for wait in sorted(unmet, key=by_cause):
        mine = wait.operation
        peers = [job.ranks[r] for r in wait.awaited if r in job.ranks]
        elsewhere = [p for p in peers if p.finished or (p.rank in waits and not _comes_soon(job, p.rank))]
        if not peers or len(elsewhere) < len(peers):
            continue
        if wait.any_of_them:
            yield from _find_sender_short(job, wait)
            continue
        peer = elsewhere[0]
        others = find_expecting(job.ranks, wait.rank, mine)
        operation = peer.first_blocking
        doing = (
            "has ended its program"
            if peer.finished
            else f"waits in {operation_words(job, operation)}"
            if operation
            else "runs on"
        )
        facts = [f"rank {wait.rank}: {message_words(mine)}{at_line(mine.site)}", f"rank {peer.rank} {doing}"]
        facts += [f"rank {r} waits in {message_words(o)}{at_line(o.site)}" for r, o in others.items()]
        needed = _needed_for(mine)
        if {wait.rank, peer.rank} <= set(case.cycle) and _posts_later(job, operation, needed):
            yield _late_finding(job, wait, peer.rank, needed)
            continue
        is_extra = operation is not None and _comes_usually_to(job.ranks[wait.rank], mine, peer, operation)
        if operation is not None and is_extra and not _most_go_on(job, operation):
            yield _surplus_finding(
                job,
                wait,
                f"than in its rounds before, and rank {peer.rank} {doing}",
                f"after the same operations as now, rank {wait.rank} made {operation.op} in its round before, "
                f"which rank {peer.rank} is in",
                peer.rank,
            )
            continue
        yield message_finding(
            "p2p-unmatched",
            f"{capitalised([wait.rank])} waits in {message_words(mine)}{at_line(mine.site)}, and rank {peer.rank} made "
            f"no {needed} for it: it {doing}.",
            job=job,
            operations={wait.rank: mine},
            culprits=(peer.rank,),
            grade=0.85 if not others else 0.7,
            evidence_class=Evidence.OTHER_END if not others else Evidence.EITHER_END,
            facts=tuple(facts),
            advice=f"Make the {needed} on rank {peer.rank}, or leave out the call{at_line(mine.site)}.",
        )


def _find_sender_short(job: JobState, wait: Wait) -> Iterator[Finding]:
    """Give the finding for a receive from any source that no rank sends to any more.

    Who sent less often than most left a message out. Where all sent as many, the receiver asks for one too many.
    """
    mine = wait.operation
    end = ChannelEnd(mine.group, wait.rank, mine.tag, sends=True)
    sent = {rank: job.ranks[rank].channels.get(end, 0) for rank in wait.awaited}
    senders = [rank for rank, count in sent.items() if count]
    if len(senders) < 2:
        return  # one alone may end whenever it likes
    most = max(sent.values())
    short = tuple(rank for rank in senders if sent[rank] < most)
    if not short and len(senders) == len(sent):
        asked = f"than the {plural(most, 'message')} that each of {list_ranks(senders)} has sent"
        yield _surplus_finding(job, wait, asked, "all of them wait elsewhere, or have ended", senders[0])
    if not short or (len(senders) > 2 and 2 * len(short) >= len(senders)):
        return  # how many each has to send is not known
    stuck = {rank: operation for rank in senders if (operation := job.ranks[rank].first_blocking) is not None}
    finding = message_finding(
        "p2p-unmatched",
        f"{capitalised([wait.rank])} waits in {message_words(mine)}{at_line(mine.site)}, and nobody sends any more: "
        f"{list_ranks(short)} sent less than the others.",
        job=job,
        operations={wait.rank: mine} | {rank: o for rank, o in stuck.items() if rank not in short},
        culprits=short,
        grade=0.75 if len(senders) > 2 else 0.6,
        facts=tuple(f"rank {rank} sent {plural(sent[rank], 'message')}" for rank in senders[:8]),
        advice=f"Make as many sends on {list_ranks(short)} as on the others, or tell the receiver how many come.",
    )
    peer = job.ranks[short[0]]
    newest = next((o for o in reversed(peer.operations) if o.p2p and o.channel_end == end), None)
    yield finding if newest is None else _with_branch(job, finding, RankCall(peer, newest), peer, after=None)


def find_omitted(case: Case) -> Iterator[Finding]:
    """Give findings for messages that a peer makes in every round, and left out of its newest one.

    It waits in the next round then, and the ranks that keep to their programs wait for it, in a chain or a cycle.
    """
    job, waits = case.job, case.job.waits
    held = [rank for rank in case.cycle if _is_new(job.ranks[rank], waits[rank][0].operation)]
    newly_held = held if len(held) > 1 else []
    for wait in case.unmet_messages[:MAX_ASKED]:
        mine = wait.operation
        for rank in wait.awaited[:MAX_ASKED]:
            stuck = waits[rank][0].operation if rank in waits else None
            usual = _find_usual(job.ranks[rank].operations, stuck, of=mine, rank=wait.rank) if stuck else None
            if usual is None or not _is_other_end(usual, of=mine, rank=wait.rank) or _left_own_program(job, wait):
                continue
            if rank in newly_held and wait.rank not in newly_held:
                continue  # it is held by a message of its own that it never made before: a consequence
            needed = _needed_for(mine)
            if stuck is not None and _is_new(job.ranks[rank], stuck) and _follows(job, stuck, needed):
                continue  # it makes it after a message that it never awaited there before: an order of its own
            if stuck is not None and _makes_all_later(job, job.ranks[rank], stuck, usual):
                continue
            if gone_on := _gone_on_after_as_many(job, wait, rank, stuck):
                yield _surplus_finding(
                    job,
                    wait,
                    f"than the other ranks made with rank {rank}",
                    f"{list_ranks(gone_on)} went on after equally many messages",
                    rank,
                )
                continue
            finding = message_finding(
                "p2p-unmatched",
                f"Rank {rank} skipped the {needed}{at_line(usual.site)} that rank {wait.rank} waits for"
                f"{at_line(mine.site)}.",
                job=job,
                operations={wait.rank: mine} | {r: of_rank[0].operation for r, of_rank in waits.items() if r != rank},
                culprits=(rank,),
                grade=0.8,
                evidence_class=Evidence.OWN_ITERATIONS,
                facts=(
                    f"rank {wait.rank}: {message_words(mine)}{at_line(mine.site)}",
                    f"after the same operations as now, rank {rank} made {message_words(usual)} in its round before",
                ),
                advice=f"Make the {needed} on rank {rank} in every round: look for a branch around it.",
            )
            peer = job.ranks[rank]
            after = operation_before(peer, stuck) if stuck is not None else None
            # Of a call that has ended the line alone is known, of one that waits at that line its callers, too.
            at_line_of_it = (r for r, of_rank in waits.items() if r != rank and of_rank[0].operation.site == usual.site)
            here = next(at_line_of_it, None)
            made = RankCall(peer, usual) if here is None else RankCall(job.ranks[here], waits[here][0].operation)
            yield _with_branch(job, finding, made, peer, after=operation_before(*made) if here is not None else after)


def find_other_partner(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks of a cycle that exchange messages in pairs, and do not agree on the pairs of a step.

    Each has posted a send to the rank that it receives from. Who exchanges with a member of another pair chose wrongly.
    """
    job = case.job
    waiting = {rank: job.waits[rank][0].operation for rank in case.cycle}
    if not waiting or not all(_is_of_an_exchange(job.ranks[rank], o) for rank, o in waiting.items()):
        return
    partners: dict[int, dict[int, set[int]]] = {}  # by step and rank
    for rank in job.ranks.values():
        for o in rank.operations:
            if o.p2p and o.step is not None:
                partners.setdefault(o.step, {}).setdefault(rank.rank, set()).add(o.peer_rank)
    for step, pairs in sorted(partners.items()):
        apart = [r for r, chosen in pairs.items() if any(q in pairs and r not in pairs[q] for q in chosen)]
        wrong = [r for r in apart if all(pairs.get(q) and q not in apart for q in pairs[r])]
        if not apart:
            continue
        culprits = tuple(sorted(wrong or apart))
        chosen = min(pairs[culprits[0]])
        left = [r for r in apart if pairs[r] & {*culprits} and r not in culprits]
        facts = [f"in step {step} rank {r} exchanges with {list_ranks(sorted(pairs[r]))}" for r in sorted(pairs)[:8]]
        yield message_finding(
            "p2p-unmatched",
            f"{capitalised(culprits)} exchanged messages with rank {chosen} in step {step}, which exchanged with "
            f"{list_ranks(sorted(pairs.get(chosen, ())))}; "
            + (f"{list_ranks(left)} turned to {list_ranks(culprits)}, " if left else "")
            + "and messages of different steps met from there on.",
            job=job,
            operations=waiting,
            culprits=culprits,
            grade=0.8 if wrong else 0.6,
            facts=tuple(facts),
            advice="Draw the pairs from a generator of their own with a common seed, or send the list from one rank.",
        )
        return


def _is_of_an_exchange(rank: RankState, waiting: Operation) -> bool:
    """Say whether a rank that waits for a message has sent one to the same peer, or the other way round."""
    return waiting.p2p and any(
        o.p2p and o.peer_rank == waiting.peer_rank and o.op != waiting.op for o in rank.open_operations
    )


def explain_exit_by_skipped_message(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for a message that a rank left out of an earlier round, and that its peer waits for in vain.

    The messages after it took its place one by one, until the rank ended one message short.
    """
    job = case.job
    for wait in case.unmet_messages[:MAX_ASKED]:
        mine = wait.operation
        for peer in (job.ranks[r] for r in wait.awaited[:MAX_ASKED] if r in job.ranks and job.ranks[r].finished):
            needed = _needed_for(mine)
            if (departure := _find_departure(peer, of=mine, rank=wait.rank)) is None:
                if (full := _find_full_round(job, peer, wait)) is not None:
                    yield explain(_one_short(job, wait, peer, full), left)
                    return
                continue
            usual, instead = departure
            finding = message_finding(
                "p2p-unmatched",
                f"Rank {peer.rank} skipped a {needed}{at_line(usual.site)} that it makes with rank {wait.rank} in "
                f"every round: later ones took the place of those before, and rank {wait.rank} waits for one more.",
                job=job,
                operations={wait.rank: mine},
                culprits=(peer.rank,),
                grade=0.8,
                evidence_class=Evidence.OWN_ITERATIONS,
                facts=(
                    f"rank {peer.rank} made {message_words(instead)} where {message_words(usual)} came before",
                    f"rank {wait.rank}: {message_words(mine)}{at_line(mine.site)}",
                ),
                advice=f"Make the {needed} on rank {peer.rank} in every round: look for a branch around it.",
            )
            yield explain(finding, left)
            return


def _needed_for(message: Operation) -> str:
    """Return which key of CALLS names the other end of a message."""
    return "receive" if message.op == "send" else "send"


def _find_full_round(job: JobState, peer: RankState, wait: Wait) -> RankState | None:
    """Return a rank that came to its end after one message more at a line than the peer, which made all rounds.

    In a loop inside a loop, one message less is one iteration of the inner loop, and not a round of the program that
    the peer ended before. Nor is it where the source counts the rounds, and no line leads out of them.
    """
    mine, place = wait.operation, job.place_in_source(wait.operation.site)
    if peer.left_at is not None or peer.first_row or place is None:
        return None
    if len(place.loops) < 2 and not find_branches_past_iteration(job, peer, {wait.rank: mine}):
        return None
    counts = {
        rank.rank: Counter(o.op for o in rank.operations if o.p2p and o.site == mine.site)
        for rank in job.ranks.values()
        if rank.finished and rank.left_at is None and not rank.first_row
    }
    of_peer = counts.get(peer.rank, Counter())
    wanted = Counter({op: count + 1 for op, count in of_peer.items()})
    full = next((rank for rank, count in counts.items() if of_peer and count == wanted), None)
    return job.ranks[full] if full is not None else None


def _one_short(job: JobState, wait: Wait, peer: RankState, full: RankState) -> Finding:
    mine, needed = wait.operation, _needed_for(wait.operation)
    finding = message_finding(
        "p2p-unmatched",
        f"Rank {peer.rank} made one {needed} less than rank {full.rank}{at_line(mine.site)}, which ended as well: "
        f"later ones took the place of those before, and rank {wait.rank} waits for one more.",
        job=job,
        operations={wait.rank: mine},
        culprits=(peer.rank,),
        grade=0.75,
        facts=(
            f"rank {wait.rank}: {message_words(mine)}{at_line(mine.site)}",
            "one less is one iteration of the loop around the line, not a round of the program that it ended before",
        ),
        advice=f"Make the {needed} on rank {peer.rank} in every iteration of the loop: look for a branch around it.",
    )
    return _with_branch(job, finding, RankCall(job.ranks[wait.rank], mine), peer, after=None)


def _with_branch(job: JobState, finding: Finding, made: RankCall, by: RankState, *, after: Operation | None) -> Finding:
    """Return a finding with the branch by which its culprit may have skipped a message, where there is one alone."""
    branches = find_branches_past(job, made, by, after=after)
    # The end of its loop is one wherever a rank left that: a line before the message says more.
    lines = [b.site for b in branches if b.kind != BranchKind.LOOP_END] or [b.site for b in branches]
    if len(lines) != 1:
        return finding
    reason = "or its loop ran fewer iterations" if len(branches) > 1 else ONLY_BRANCH
    evidence = (*finding.evidence, skip_evidence(by.rank, lines[0], reason=reason))
    return replace(finding, culprit_call_sites={by.rank: lines[0]}, evidence=evidence)


def _find_departure(peer: RankState, *, of: Operation, rank: int) -> tuple[Operation, Operation] | None:
    """Return the one message that a rank skipped in its rounds as the other end, and what it did instead."""
    departures = [
        (usual, peer.operations[at])
        for at, usual in find_departures(peer.operations)
        if _is_other_end(usual, of=of, rank=rank)
    ]
    return departures[0] if len(departures) == 1 else None


def _find_usual(operations: Sequence[Operation], stuck: Operation, *, of: Operation, rank: int) -> Operation | None:
    """Return the other end of a message where a rank usually makes it before what it is in, and did not now."""
    usual = usual_operation(operations, stuck)
    if usual is None or not _is_other_end(usual, of=of, rank=rank):
        usual = left_out_of_round(operations, stuck)
    return usual


def _gone_on_after_as_many(job: JobState, wait: Wait, peer: int, stuck: Operation | None) -> tuple[int, ...]:
    """Return the ranks that went on with the peer after fewer messages with it than this rank asks for.

    Most members are in the collective then that the peer is in, and each has had as many messages as any other.
    """
    if stuck is None or stuck.p2p:
        return ()
    here = tuple(
        r
        for r in stuck.group.ranks
        if r in job.ranks and any((o.group, o.seq) == (stuck.group, stuck.seq) for o in job.ranks[r].open_operations)
    )
    mine = wait.operation
    end = replace(mine.channel_end, peer=peer)
    counts = {job.ranks[r].channels.get(end, 0) for r in here if r != peer}
    asked = job.ranks[wait.rank].channels.get(end, 0)
    alike = len(counts) == 1 and 0 < min(counts) < asked
    return here if alike and len(here) > 2 and 2 * len(here) > len(stuck.group.ranks) else ()


def _comes_usually_to(rank: RankState, mine: Operation, peer: RankState, stuck: Operation) -> bool:
    """Say whether a rank made, in its rounds before, what its peer is in and no such message; the peer does as ever."""
    usual = usual_operation(rank.operations, mine)
    return usual is not None and usual.label == stuck.label and usual_operation(peer.operations, stuck) is None


def _most_go_on(job: JobState, stuck: Operation) -> bool:
    """Say whether more ranks exchange messages where they came to a collective before than have come to it now."""
    first = {rank: o for rank in job.ranks if (o := job.ranks[rank].first_blocking) is not None}
    come = [rank for rank, o in first.items() if (o.group, o.seq) == (stuck.group, stuck.seq)]
    usual = (usual_operation(job.ranks[rank].operations, o) for rank, o in first.items() if o.p2p)
    return sum(o is not None and o.label == stuck.label for o in usual) > len(come)


def _surplus_finding(job: JobState, wait: Wait, than: str, fact: str, peer: int) -> Finding:
    mine = wait.operation
    call = "send" if mine.op == "send" else "receive"
    return message_finding(
        "p2p-unmatched",
        f"Rank {wait.rank} waits in {message_words(mine)}{at_line(mine.site)}, one {call} more {than}.",
        job=job,
        operations={wait.rank: mine},
        culprits=(wait.rank,),
        grade=0.75,
        facts=(fact,),
        advice=f"Leave out the {call}, or make its other end on rank {peer}: count both sides of the loop.",
    )


def _posts_later(job: JobState, stuck: Operation | None, needed: str) -> bool:
    """Say whether the source makes the other end of a message after the collective that a rank is in."""
    return stuck is not None and not stuck.p2p and _follows(job, stuck, needed)


def _follows(job: JobState, stuck: Operation, needed: str) -> bool:
    """Say whether the source makes an end of a message after the line of an operation, in its round of the loop."""
    place = job.place_in_source(stuck.site)
    return place is not None and any(name in CALLS[needed] for name, _ in place.following)


def _makes_all_later(job: JobState, peer: RankState, stuck: Operation, usual: Operation) -> bool:
    """Say whether the source calls the function of a message as often after where a rank is as a round of it did.

    Its rounds began with the message, and the rank waits at a line that it came to after that: the order is new.
    """
    ends = [(o.label, o.peer_rank) for o in peer.operations if o != stuck]
    awaited, sent = (stuck.label, stuck.peer_rank), (usual.label, usual.peer_rank)
    if peer.first_row or usual.site is None or not {awaited, sent} <= {*ends} or ends.index(sent) > ends.index(awaited):
        return False
    earlier = [i for i, end in enumerate(ends) if end == awaited]
    begin = earlier[-2] + 1 if len(earlier) > 1 else 0
    of_a_round = ends[begin : earlier[-1] + 1].count(sent)
    name = usual.site.function.rpartition(".")[2]
    for frame in frames_of(peer, stuck)[1:]:
        place = job.place_in_source(frame)
        if place is not None and frame.function != usual.site.function:
            calls = [line for called, line in place.following if called == name and line > frame.line]
            if calls and len(calls) >= of_a_round > 0:
                return True
    return False


def _is_new(rank: RankState, operation: Operation) -> bool:
    """Say whether a rank has not made an operation at this line before: of a message, not with this peer."""
    before = (o for o in rank.operations if o.site == operation.site and o.issued_ns < operation.issued_ns)
    return not any(not operation.p2p or o.peer_rank == operation.peer_rank for o in before)


def _late_finding(job: JobState, wait: Wait, peer: int, needed: str) -> Finding:
    mine, stuck = wait.operation, job.waits[peer][0].operation
    return message_finding(
        "p2p-deadlock-cycle",
        f"{capitalised(sorted((wait.rank, peer)))} wait for one another: rank {wait.rank} in {message_words(mine)}"
        f"{at_line(mine.site)}, rank {peer} in {operation_words(job, stuck)}; its source makes the {needed} only then.",
        job=job,
        operations={wait.rank: mine, peer: stuck},
        culprits=tuple(sorted((wait.rank, peer))),
        grade=0.8,
        facts=(f"rank {wait.rank} is a member that {stuck.op} #{stuck.seq} waits for",),
        advice=f"Make the {needed} before {stuck.op}, or post the message without waiting (isend, irecv).",
    )


def _is_other_end(operation: Operation, *, of: Operation, rank: int) -> bool:
    return operation.p2p and operation.op != of.op and operation.group == of.group and operation.peer_rank == rank


def _left_own_program(job: JobState, wait: Wait) -> bool:
    return usual_operation(job.ranks[wait.rank].operations, wait.operation) is not None


def find_untaken_message(case: Case) -> Iterator[Finding]:
    """Give a finding for the first message of a job that ended well which was sent and never taken.

    The backend kept it: whoever was to take it has taken the next one, or goes on without.
    """
    job = case.job
    ranks = job.ranks
    if not job.is_complete or job.missing or not all(r.finished and r.sees_program for r in ranks.values()):
        return
    ends = [(rank, end, count) for rank in ranks.values() for end, count in rank.channels.items()]
    if any(end.peer < 0 for _, end, _ in ends):
        return
    for rank, end, count in ends:
        peer = ranks.get(end.peer)
        if not end.sends or peer is None or peer is rank:
            continue
        taken = peer.channels.get(end.other(rank.rank), 0)
        if not 0 < taken < count:  # first: to look through the operations of a rank takes long
            continue
        sent = [o for o in rank.operations if o.op == "send" and o.channel_end == end]
        if not sent:
            continue
        usual = next((o for o in peer.operations if o.op == "recv" and o.channel_end == end.other(rank.rank)), None)
        finding = message_finding(
            "p2p-unmatched",
            f"Rank {rank.rank} made {plural(count, 'send')} to rank {peer.rank}{at_line(sent[-1].site)}, which took "
            f"{taken:,} of them{at_line(usual.site if usual is not None else None)}: later ones took the place of "
            "those before.",
            job=job,
            operations={rank.rank: sent[-1]} | ({peer.rank: usual} if usual is not None else {}),
            culprits=(peer.rank,),
            grade=0.7,
            evidence_class=Evidence.EITHER_END,
            facts=(f"the backend kept {plural(count - taken, 'message')} until the end",),
            advice=f"Make as many receives on rank {peer.rank} as rank {rank.rank} makes sends.",
        )
        yield replace(finding, severity="warning")
        return


def _comes_soon(job: JobState, rank: int) -> bool:
    """Say whether a rank waits only for messages of ranks that go on and are not blocked: it may yet post this one."""
    return all(
        wait.operation.p2p and not any(r in job.waits or job.ranks[r].finished for r in wait.awaited if r in job.ranks)
        for wait in job.waits[rank]
    )


RULES: Declared = (
    Rule(kinds=("p2p-unmatched",), stages=(Stage.WAIT,), find=find_omitted),
    Rule(kinds=("p2p-unmatched",), stages=(Stage.WAIT,), find=find_other_partner),
    Rule(kinds=("p2p-unmatched",), stages=(Stage.WAIT,), find=find_unmatched),
    Rule(kinds=("p2p-unmatched",), stages=(Stage.MISPAIRED,), find=find_untaken_message),
    Refinement(
        kinds=("p2p-unmatched",),
        causes=("rank-exited",),
        stages=(Stage.WAIT, Stage.LATE),
        refine=explain_exit_by_skipped_message,
    ),
)
