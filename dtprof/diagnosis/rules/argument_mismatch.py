"""Members of a collective disagree on operation, root, type, reduction or sizes, even if the backend let it pass."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dtprof.columns import distinct
from dtprof.diagnosis.blocked_ranks import call_sites, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.call_divergence import RankCall, align_frames
from dtprof.diagnosis.divergence.skip_findings import ONE_ORDER
from dtprof.diagnosis.divergence.source_paths import are_branches_in_loop
from dtprof.diagnosis.findings import Evidence, Finding, at_line, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rank_failures import NATIVE_CRASHES
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.agreement import Disagreement, disagreement_at, sizes_at
from dtprof.job.group_collectives import at_position, group_tables, line_of
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.codes import dtype_name, reduce_op_name
from dtprof.records.sites import Site

_KIND_OF = {
    "op": "collective-order-mismatch",
    "peer": "root-mismatch",
    "dtype": "dtype-mismatch",
    "reduce_op": "reduce-op-mismatch",
    "numel": "size-mismatch",
    "sizes": "split-size-mismatch",
}
"""By the argument that members disagree in."""
KINDS = tuple(_KIND_OF.values())
WORDS = {
    "peer": "roots",
    "dtype": "element types",
    "reduce_op": "reductions",
    "numel": "sizes",
    "sizes": "split sizes",
}
OR_SKIPPED = (
    "the two calls are branches of one `if` in a loop: the rank went through its items in another order, or lacks one"
)


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
            # What the backend let pass before, of the same ranks, came first: all later positions are shifted.
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
            yield replace(_finding(case.job, last.group, disagreement), grade=0.75, evidence_class=None)


def _find_mismatch_before(case: Case) -> Iterator[Finding]:
    """Find a mismatch before the stalled operation: devices compare nothing, and hang or diverge later."""
    if not any(operation.on_device for rank in case.job.ranks.values() for operation in rank.open_operations):
        return
    stuck = {collective.group: collective.waiting for collective in case.open_collectives}
    mismatches = sorted(mismatches_by_group(case).items(), key=lambda item: (item[0] not in stuck, -item[1].grade))
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
    """Return the mismatches of a line that all members were at, which the backend let pass: no hang explains them."""
    silent = case.findings(find_silent_mismatches)
    return [m for m in silent if len({*m.call_sites.values(), *m.culprit_call_sites.values()}) == 1]


def _finding(job: JobState, group_id: GroupId, disagreement: Disagreement) -> Finding:
    calls, culprits = disagreement.operations, disagreement.minority
    is_again = _is_made_again(job, group_id, disagreement)
    is_other_call = is_again or _is_other_call(job, group_id, disagreement)
    comes_later = _comes_to_theirs_later(job, calls, culprits)
    may_have_skipped = _may_have_skipped(job, group_id, disagreement)
    is_of_loop = disagreement.argument == "op" and are_branches_in_loop(
        job, calls[culprits[0]].site, calls[_usual_rank(disagreement)].site
    )
    group, sites = job.group(group_id), call_sites(calls)
    is_unclear = may_have_skipped or disagreement.is_tie
    passed = all(operation.done for operation in calls.values())
    evidence = (
        *_show_arguments(disagreement),
        *(_place_words(disagreement, is_again=is_again) if is_other_call else ()),
        *_caveats(disagreement, passed=passed),
        *(_later_words(culprits) if comes_later else ()),
        *(_skip_words(culprits) if may_have_skipped else ()),
        *([OR_SKIPPED] if is_of_loop and not passed else []),
    )
    return Finding(
        kind=_KIND_OF["op" if is_other_call else disagreement.argument],
        summary=_summarise(group_words(group), disagreement, is_other_call=is_other_call, is_again=is_again),
        culprit_ranks=culprits,
        waiting_ranks=() if passed else tuple(sorted({*victims(job, {*culprits}), *calls}.difference(culprits))),
        grade=0.6 if is_unclear else 0.7 if is_of_loop else 0.75 if disagreement.is_new else 0.9,
        evidence_class=None
        if is_unclear or is_of_loop
        else Evidence.FIRST_TIME
        if disagreement.is_new
        else Evidence.DIRECT,
        group=group,
        op=calls[_usual_rank(disagreement)].op,
        seq=disagreement.seq,
        step=calls[culprits[0]].step,
        call_sites={rank: site for rank, site in sites.items() if rank not in culprits},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=evidence,
        advice=(
            _advise(sites, culprits, is_own_call=comes_later or (is_other_call and not is_again)),
            *([ONE_ORDER] if is_of_loop else []),
        ),
    )


def _usual_rank(disagreement: Disagreement) -> int:
    """Return one of the ranks that the culprits disagree with; a culprit where there are no others."""
    culprits = disagreement.minority
    return next((rank for rank in disagreement.operations if rank not in culprits), culprits[0])


def _summarise(group: str, disagreement: Disagreement, *, is_other_call: bool, is_again: bool) -> str:
    """Say in one sentence what the culprits have, or call, and what the others."""
    culprits, usual = disagreement.minority, _usual_rank(disagreement)
    who, is_one = list_ranks(culprits), len(culprits) == 1
    mine, theirs = disagreement.operations[culprits[0]], disagreement.operations[usual]
    has, others_have = (_show(disagreement, rank) for rank in (culprits[0], usual))
    position = f"#{disagreement.seq} of {group}"
    if disagreement.argument == "op":
        return f"At {position}, {who} {'calls' if is_one else 'call'} {has}, the others {others_have}."
    words = WORDS[disagreement.argument]
    if is_other_call:
        verb, whose = ("makes", "its") if is_one else ("make", "their")
        does = f"{verb} the call before again" if is_again else f"{verb} a call of {whose} own"
        return (
            f"At {position}, {who} {does}, {mine.op}{at_line(mine.site)}; the others "
            f"{'go on to' if is_again else 'make their usual'} {theirs.op}{at_line(theirs.site)}, with other {words}."
        )
    if disagreement.bad_pairs:
        differs = f"{who} {'does' if is_one else 'do'} not fit"
    else:
        differs = f"{who} {'has' if is_one else 'have'} {has}, the others {others_have}"
    return f"Operation {position} has different {words}: {differs} ({theirs.op})."


def _show_arguments(disagreement: Disagreement) -> Iterator[str]:
    """Say what each rank passed, and which pairs of ranks do not fit."""
    for sender, receiver, given, wanted in disagreement.bad_pairs[:4]:
        yield f"rank {sender} sends {given:,} elements to rank {receiver}, which expects {wanted:,}"
    for rank, operation in sorted(disagreement.operations.items())[:8]:
        yield f"rank {rank}: {_show(disagreement, rank)}{at_line(operation.site)}"


def _place_words(disagreement: Disagreement, *, is_again: bool) -> Iterator[str]:
    """Say what is odd about the line of the culprits, where that is what differs."""
    functions = {operation.site.function for operation in disagreement.operations.values() if operation.site}
    where = ", in another function," if len(functions) > 1 else ""
    when = "all had called just" if is_again else "no rank had called"
    yield f"the line of {list_ranks(disagreement.minority)}{where} is one that {when} before"


def _caveats(disagreement: Disagreement, *, passed: bool) -> Iterator[str]:
    culprits = list_ranks(disagreement.minority)
    if disagreement.has_changed:
        yield f"{culprits} exchanged other amounts in each earlier call at this line"
    if passed:
        yield "the backend let it pass: results are silently wrong"
    if disagreement.is_new:
        yield f"the ranks split into equal halves: {culprits} made this call for the first time, the others not"
    if disagreement.is_tie:
        yield "the ranks split into equal halves: which half is wrong is a guess"


def _later_words(culprits: tuple[int, ...]) -> Iterator[str]:
    comes, own = ("comes", "its") if len(culprits) == 1 else ("come", "their")
    yield f"{list_ranks(culprits)} {comes} to the call of the others after {own} own"


def _skip_words(culprits: tuple[int, ...]) -> Iterator[str]:
    yield (
        f"the source cannot be read: {list_ranks(culprits)} may as well have skipped the calls of the others, as by "
        "leaving a loop early"
    )


def _advise(sites: Mapping[int, Site], culprits: tuple[int, ...], *, is_own_call: bool) -> str:
    if len({(site.file, site.line) for site in sites.values()}) == 1:
        return "Compare what the ranks pass at this line: every member must make the same call at this position."
    if is_own_call and culprits[0] in sites:
        return f"Make the call{at_line(sites[culprits[0]])} on every member of the group, or on none."
    return "Compare the two lines: every member must make the same call at this position."


def _is_other_call(job: JobState, group: GroupId, disagreement: Disagreement) -> bool:
    """Say whether the minority made a call of its own, where the others made their usual one.

    A call of another function, or under a condition which that of the others is under on neither side.
    """
    sites = {rank: operation.site for rank, operation in disagreement.operations.items()}
    odd = {site for rank, site in sites.items() if rank in disagreement.minority}
    usual = {site for rank, site in sites.items() if rank not in disagreement.minority}
    if len(odd) != 1 or len(usual) != 1 or None in odd | usual or disagreement.argument == "sizes":
        return False
    (mine,), (theirs,) = odd, usual
    if mine is None or theirs is None:
        return False
    if mine.shares_function(theirs) and not _is_under_own_condition(job, mine, theirs):
        return False
    return _is_new(job, group, disagreement, mine, theirs)


def _is_new(job: JobState, group: GroupId, disagreement: Disagreement, mine: Site | None, theirs: Site | None) -> bool:
    """Say whether no rank had come to a line before, and some had come to the other."""
    tables = [table[table["seq"] < disagreement.seq] for table in group_tables(job.ranks)[group].values()]
    known = [{int(line) for line in distinct(table["line"])} for table in tables]
    return not any(line_of(mine) in lines for lines in known) and any(line_of(theirs) in lines for lines in known)


def _may_have_skipped(job: JobState, group: GroupId, disagreement: Disagreement) -> bool:
    """Say whether the minority is where nobody has been before, and only the source could tell how it came there.

    As a rank that has left its loop early, and is in the barrier after it.
    """
    calls, culprits = disagreement.operations, disagreement.minority
    mine, theirs = calls[culprits[0]], calls[_usual_rank(disagreement)]
    is_stuck = disagreement.argument == "op" and not mine.done and len(calls) > len(culprits)
    is_unread = job.place_in_source(mine.site) is None
    return is_stuck and is_unread and _is_new(job, group, disagreement, mine.site, theirs.site)


def _comes_to_theirs_later(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> bool:
    """Say whether the source has the culprits' call under a condition, and that of the others after it for all."""
    other = next((rank for rank in present if rank not in culprits), culprits[0])
    a, b, common = align_frames(*(RankCall(job.ranks[rank], present[rank]) for rank in (culprits[0], other)))
    here, there = (job.place_in_source(frames[common]) if common is not None else None for frames in (a, b))
    if here is None or there is None or common is None or not {*there.branches} < {*here.branches}:
        return False
    return any(line == b[common].line for _, line in here.following)


def _is_made_again(job: JobState, group: GroupId, disagreement: Disagreement) -> bool:
    """Say whether the minority made the call that all had made just before, and never one at the line of the others.

    Of another function: one line of a loop takes what there is, and sizes differ.
    """
    functions = {
        operation.site.function for operation in disagreement.operations.values() if operation.site is not None
    }
    if disagreement.argument in ("op", "sizes") or len(functions) < 2:
        return False
    tables = group_tables(job.ranks)[group]
    before = {operation.site for operation in at_position(job.ranks, tables, disagreement.seq - 1).values()}
    theirs = {line_of(o.site) for rank, o in disagreement.operations.items() if rank not in disagreement.minority}
    is_new = not any({*map(int, distinct(tables[rank]["line"]))} & theirs for rank in disagreement.minority)
    return is_new and before == {disagreement.operations[rank].site for rank in disagreement.minority}


def _is_under_own_condition(job: JobState, mine: Site, theirs: Site) -> bool:
    """Say whether a line depends on a condition of its function on which another line does not depend."""
    here, there = job.place_in_source(mine), job.place_in_source(theirs)
    return here is not None and there is not None and not set(here.conditions) <= set(there.conditions)


def _show(disagreement: Disagreement, rank: int) -> str:
    """Return what a rank passed as the argument on which the members disagree."""
    argument, operation = disagreement.argument, disagreement.operations[rank]
    if argument == "peer":
        return f"root rank {operation.peer_rank}" if operation.peer_rank >= 0 else f"root {operation.peer}"
    if argument == "dtype":
        return dtype_name(operation.dtype)
    if argument == "reduce_op":
        return reduce_op_name(operation.reduce_op)
    if argument == "numel":
        return f"{disagreement.values[rank]:,} elements"
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
