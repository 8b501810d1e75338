"""Members of a collective disagree on operation, root, type, reduction or sizes, even if the back end let it pass."""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.columns import distinct
from dtprof.diagnosis.blocked_ranks import call_sites, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import align_frames
from dtprof.diagnosis.findings import Finding, at_line, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rank_failures import NATIVE_CRASHES
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job import agreement
from dtprof.job.agreement import Disagreement, disagreement_at, sizes_at
from dtprof.job.group_collectives import at_position, group_tables, line_of
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.codes import dtype_name, reduce_op_name
from dtprof.records.sites import Site

KINDS = tuple(agreement.KINDS.values())
WORDS = {
    "peer": "roots",
    "dtype": "element types",
    "reduce_op": "reductions",
    "numel": "sizes",
    "sizes": "split sizes",
}


def find_mismatches(case: Case) -> list[Finding]:
    """Return a finding for the first sequence number of each group at which members issued mismatched operations."""
    return [*mismatches_by_group(case).values()]


def mismatches_by_group(case: Case) -> dict[GroupId, Finding]:
    """Return the same by group; those of the earliest step come first."""
    findings = {group: _finding(case.job, group, first) for group, first in case.disagreements.items()}
    return dict(sorted(findings.items(), key=lambda item: item[1].step or 0))


def find_blocking_mismatches(case: Case) -> Iterator[Finding]:
    """Give a mismatch that precedes the stalled operation, then one at a position that blocks ranks."""
    yield from _find_mismatch_before(case)
    groups = group_tables(case.job.ranks)
    for collective in case.open_collectives:
        disagreement = disagreement_at(case.job.ranks, groups.get(collective.group, {}), collective.seq)
        if disagreement is not None:
            # What the back end let pass before, of the same ranks, came first: all later positions are shifted.
            first = case.disagreements.get(collective.group, disagreement)
            involved = {*disagreement.minority, *(rank for pair in disagreement.bad_pairs for rank in pair[:2])}
            is_cause = first.seq < disagreement.seq and involved.issuperset(first.minority) and not first.is_tie
            yield _finding(case.job, collective.group, first if is_cause else disagreement)
            return


def find_sizes_behind_abort(case: Case) -> Iterator[Finding]:
    """Give a size mismatch where native code crashed in a collective, also in one that may take uneven sizes."""
    groups = group_tables(case.job.ranks)
    for rank in case.job.ranks.values():
        last = rank.first_blocking or (rank.operations[-1] if rank.operations else None)
        if rank.signal_name not in NATIVE_CRASHES or last is None or last.p2p:
            continue
        disagreement = sizes_at(case.job.ranks, groups.get(last.group, {}), last.seq)
        if disagreement is not None:
            yield replace(_finding(case.job, last.group, disagreement), confidence=0.75)


def _find_mismatch_before(case: Case) -> Iterator[Finding]:
    """Find a mismatch before the stalled operation: devices compare nothing, and hang or diverge later."""
    if not any(operation.on_device for rank in case.job.ranks.values() for operation in rank.open_operations):
        return
    stuck = {collective.group: collective.waiting for collective in case.open_collectives}
    mismatches = sorted(mismatches_by_group(case).items(), key=lambda item: (item[0] not in stuck, -item[1].confidence))
    for group, first in mismatches[:1]:
        yield replace(
            first,
            waiting_ranks=tuple(sorted(set(stuck.get(group, ())) - set(first.culprit_ranks))),
            evidence=(*first.evidence, *(finding.summary for _, finding in mismatches[1:4])),
        )


def find_silent_mismatches(case: Case) -> list[Finding]:
    """Return the mismatches that blocked no rank."""
    return [finding for finding in case.findings(find_mismatches) if not finding.waiting_ranks]


def find_silent_beside_hang(case: Case) -> list[Finding]:
    """Return the mismatches of a line that all members were at, which the back end let pass: no hang explains them."""
    silent = case.findings(find_silent_mismatches)
    return [one for one in silent if len({*one.call_sites.values(), *one.culprit_call_sites.values()}) == 1]


def _finding(job: JobState, group_id: GroupId, found: Disagreement) -> Finding:
    present, culprits, seq = found.operations, found.minority, found.seq
    again = _is_made_again(job, group_id, found)
    is_other_call = again or _is_other_call(job, group_id, found)
    kind = agreement.KINDS["op" if is_other_call else found.argument]
    shown = {rank: _show(found, rank) for rank in present}
    usual = next((rank for rank in present if rank not in culprits), culprits[0])
    group = job.group(group_id)
    sites = call_sites(present)
    passed = all(operation.done for operation in present.values())
    facts = [
        f"rank {sender} sends {given:,} elements to rank {receiver}, which expects {wanted:,}"
        for sender, receiver, given, wanted in found.bad_pairs[:4]
    ]
    facts += [f"rank {rank}: {shown[rank]}{at_line(sites.get(rank))}" for rank in sorted(shown)[:8]]
    if is_other_call:
        functions = {site.function for site in sites.values()}
        where = ", in another function," if len(functions) > 1 else ""
        when = "all had called just" if again else "no rank had called"
        facts.append(f"the line of {list_ranks(culprits)}{where} is one that {when} before")
    if found.has_changed:
        facts.append(f"{list_ranks(culprits)} exchanged other amounts in each earlier call at this line")
    if passed:
        facts.append("the back end let it pass: results are silently wrong")
    if found.is_new:
        facts.append(
            f"the ranks split into equal halves: {list_ranks(culprits)} made this call for the first time, "
            "the others not"
        )
    if found.is_tie:
        facts.append("the ranks split into equal halves: which half is wrong is a guess")
    op = present[usual].op
    who, is_one = list_ranks(culprits), len(culprits) == 1
    if found.argument == "op":
        differs = f"At #{seq} of {group_words(group)}, {who} {'calls' if is_one else 'call'} {shown[culprits[0]]}"
        summary = f"{differs}, the others {shown[usual]}."
    elif is_other_call:
        verb, whose = ("makes", "its") if is_one else ("make", "their")
        does = f"{verb} the call before again" if again else f"{verb} a call of {whose} own"
        summary = (
            f"At #{seq} of {group_words(group)}, {who} {does}, {present[culprits[0]].op}{at_line(sites[culprits[0]])}; "
            f"the others {'go on to' if again else 'make their usual'} {op}{at_line(sites[usual])}, with other "
            f"{WORDS[found.argument]}."
        )
    else:
        tail = (
            f"{who} {'does' if is_one else 'do'} not fit ({op})"
            if found.bad_pairs
            else f"{who} {'has' if is_one else 'have'} {shown[culprits[0]]}, the others {shown[usual]} ({op})"
        )
        summary = f"Operation #{seq} of {group_words(group)} has different {WORDS[found.argument]}: {tail}."
    advice = "Compare the two lines: every member must make the same call at this position."
    comes_later = _comes_to_theirs_later(job, present, culprits)
    if comes_later:
        facts.append(
            f"{who} {'comes' if is_one else 'come'} to the call of the others after {'its' if is_one else 'their'} own"
        )
    if (comes_later or (is_other_call and not again)) and (own := sites.get(culprits[0])) is not None:
        advice = f"Make the call{at_line(own)} on every member of the group, or on none."
    may_have_skipped = _may_have_skipped(job, group_id, found, usual)
    if may_have_skipped:
        facts.append(
            f"the source cannot be read: {who} may as well have skipped the calls of the others, as by leaving a loop "
            "early"
        )
    at_one_line = len({(site.file, site.line) for site in sites.values()}) == 1
    blocked = () if passed else tuple(sorted({*victims(job, set(culprits)), *(set(present) - set(culprits))}))
    return Finding(
        kind=kind,
        summary=summary,
        culprit_ranks=culprits,
        waiting_ranks=blocked,
        confidence=0.6 if may_have_skipped else 0.75 if found.is_new else 0.6 if found.is_tie else 0.9,
        group=group,
        op=op,
        seq=seq,
        step=present[culprits[0]].step,
        call_sites={rank: site for rank, site in sites.items() if rank not in culprits},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=tuple(facts),
        advice=(
            "Compare what the ranks pass at this line: every member must make the same call at this position."
            if at_one_line
            else advice,
        ),
    )


def _is_other_call(job: JobState, group: GroupId, found: Disagreement) -> bool:
    """Say whether the minority made a call of its own, where the others made their usual one.

    A call of another function, or under a condition which that of the others is under on neither side.
    """
    sites = {rank: operation.site for rank, operation in found.operations.items()}
    odd = {site for rank, site in sites.items() if rank in found.minority}
    usual = {site for rank, site in sites.items() if rank not in found.minority}
    if len(odd) != 1 or len(usual) != 1 or None in odd | usual or found.argument == "sizes":
        return False
    (mine,), (theirs,) = odd, usual
    if mine is None or theirs is None:
        return False
    if mine.shares_function(theirs) and not _is_under_own_condition(job, mine, theirs):
        return False
    return _is_new(job, group, found, mine, theirs)


def _is_new(job: JobState, group: GroupId, found: Disagreement, mine: Site | None, theirs: Site | None) -> bool:
    """Say whether no rank had come to a line before, and some had come to the other."""
    tables = [table[table["seq"] < found.seq] for table in group_tables(job.ranks)[group].values()]
    known = [{int(line) for line in distinct(table["line"])} for table in tables]
    return not any(line_of(mine) in lines for lines in known) and any(line_of(theirs) in lines for lines in known)


def _may_have_skipped(job: JobState, group: GroupId, found: Disagreement, usual: int) -> bool:
    """Say whether the minority is where nobody has been before, and only the source could tell how it came there.

    As a rank that has left its loop early, and is in the barrier after it.
    """
    mine, theirs = found.operations[found.minority[0]], found.operations[usual]
    is_stuck = found.argument == "op" and not mine.done and len(found.operations) > len(found.minority)
    return is_stuck and job.place_in_source(mine.site) is None and _is_new(job, group, found, mine.site, theirs.site)


def _comes_to_theirs_later(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> bool:
    """Say whether the source has the culprits' call under a condition, and that of the others after it for all."""
    other = next((rank for rank in present if rank not in culprits), culprits[0])
    a, b, common = align_frames(*((job.ranks[rank], present[rank]) for rank in (culprits[0], other)))
    here, there = (job.place_in_source(frames[common]) if common is not None else None for frames in (a, b))
    if here is None or there is None or common is None or not {*there.branches} < {*here.branches}:
        return False
    return any(line == b[common].line for _, line in here.following)


def _is_made_again(job: JobState, group: GroupId, found: Disagreement) -> bool:
    """Say whether the minority made the call that all had made just before, and never one at the line of the others.

    Of another function: one line of a loop takes what there is, and sizes differ.
    """
    functions = {operation.site.function for operation in found.operations.values() if operation.site is not None}
    if found.argument in ("op", "sizes") or len(functions) < 2:
        return False
    tables = group_tables(job.ranks)[group]
    before = {operation.site for operation in at_position(job.ranks, tables, found.seq - 1).values()}
    theirs = {line_of(o.site) for rank, o in found.operations.items() if rank not in found.minority}
    is_new = not any({*map(int, distinct(tables[rank]["line"]))} & theirs for rank in found.minority)
    return is_new and before == {found.operations[rank].site for rank in found.minority}


def _is_under_own_condition(job: JobState, mine: Site, theirs: Site) -> bool:
    """Say whether a line depends on a condition of its function on which another line does not depend."""
    here, there = job.place_in_source(mine), job.place_in_source(theirs)
    return here is not None and there is not None and not set(here.conditions) <= set(there.conditions)


def _show(found: Disagreement, rank: int) -> str:
    argument, operation = found.argument, found.operations[rank]
    if argument == "peer":
        return f"root rank {operation.peer_rank}" if operation.peer_rank >= 0 else f"root {operation.peer}"
    if argument == "dtype":
        return dtype_name(operation.dtype)
    if argument == "reduce_op":
        return reduce_op_name(operation.reduce_op)
    if argument == "numel":
        return f"{found.values[rank]:,} elements"
    if argument == "sizes":
        return "even splits" if operation.sizes is None else f"splits {list(operation.sizes[0][:8])}"
    return operation.op


RULES: Declared = (
    Rule(kinds=KINDS, stages=(Stage.DIVERGENCE,), find=find_blocking_mismatches),
    Rule(kinds=("size-mismatch",), stages=(Stage.BROKEN_MESSAGE,), find=find_sizes_behind_abort),
    Rule(kinds=KINDS, stages=(Stage.MISPAIRED,), find=find_mismatches),
    Rule(kinds=KINDS, stages=(Stage.BESIDE_CRASH,), find=find_silent_mismatches),
    Rule(kinds=KINDS, stages=(Stage.BESIDE_HANG,), find=find_silent_beside_hang),
)
