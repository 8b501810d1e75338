"""Collectives in an exception handler or a finally block that met collectives outside of it.

The records give the call sites; the source shows the handler, if it can still be read and is older than the job. In a
job that went well a handler may have made good the call that its exception left out: a note. All ranks come to a
finally block: one that is there before the others holds an exception back, and shifts their calls: a warning.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_branches import find_handler
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words
from dtprof.diagnosis.job_state import Handler, JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.agreement import disagreement_at
from dtprof.job.group_collectives import at_position, at_same_positions, group_tables
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.records.sites import Site
from dtprof.records.tables import Array

MAX_PAIRS = 64
"""Pairs of call sites in a group whose source is read at most."""


def find_handled(case: Case) -> Iterator[Finding]:
    """Give a finding for each collective in a handler that was paired with one of ranks that were in none.

    If all members reach the handler together, all of them raised, which is no fault.
    """
    job = case.job
    if job.find_handlers is None:
        return
    reported: set[Site] = set()
    for group, tables in group_tables(job.ranks).items():
        for seq in _where_lines_differ(tables):
            present = at_position(job.ranks, tables, seq)
            handled = {rank: handler for rank, o in present.items() if (handler := _handler(job, o.site)) is not None}
            if not handled or len(handled) == len(present) or disagreement_at(job.ranks, tables, seq) is not None:
                continue
            first = present[min(handled)].site
            if first is not None and first not in reported:
                reported.add(first)
                yield _finding(job, group, present, handled)


def find_beside_crash(case: Case) -> Iterator[Finding]:
    """Give a warning for each of them in a job in which a rank raised: what was held back or handled is the fault."""
    for finding in find_handled(case):
        yield replace(finding, severity="warning")


def explain_by_handlers(job: JobState, finding: Finding) -> Finding:
    """Return a finding with the handlers in which its culprits made their calls, as evidence."""
    if finding.kind in ("collective-in-except", "rank-crashed", "rank-killed"):
        return finding
    facts = dict.fromkeys(
        f"rank {rank} made this call in {_block_words(handler)}: it had raised, and the others had not"
        for rank, site in sorted(finding.culprit_call_sites.items())
        if (handler := _handler(job, site)) is not None and site not in finding.call_sites.values()
    )
    if not facts and finding.kind == "rank-skipped-collective":
        facts = dict.fromkeys(_words_on_callers(job, finding))
    return replace(finding, evidence=(*finding.evidence, *facts)) if facts else finding


def _words_on_callers(job: JobState, finding: Finding) -> Iterator[str]:
    """Give the handlers whose callers a rank waits in, while those that it left were not in one."""
    others = {
        handler for r in finding.waiting_ranks[:1] if r in job.ranks and (handler := find_handler(job, job.ranks[r]))
    }
    for rank in finding.culprit_ranks:
        handler = find_handler(job, job.ranks[rank]) if rank in job.ranks else None
        if handler is not None and handler not in others:
            site, is_finally = handler
            block = "a `finally` block" if is_finally else "an exception handler"
            yield (
                f"rank {rank} came to this call through {block}{at_line(site)}: it holds an exception, or left its "
                "block early, and the others have not"
            )


def _block_words(handler: Handler) -> str:
    return f"{'a `finally` block' if handler.is_finally else f'`{handler.text}`'} (line {handler.line})"


def _where_lines_differ(tables: dict[int, Array]) -> Iterator[int]:
    """Yield the first position of each pair of lines at which two ranks made one operation."""
    reference, *others = tables.values()
    pairs: set[tuple[int, int]] = set()
    for other in others:
        a, b = at_same_positions(reference, other)
        at = np.flatnonzero((a["line"] != b["line"]) & (a["op"] == b["op"]))
        if not len(at):  # as a rule
            continue
        lines = np.stack([a["line"][at], b["line"][at]], axis=1)
        _, first = np.unique(lines, axis=0, return_index=True)
        for i in np.sort(first).tolist():
            pair = int(lines[i][0]), int(lines[i][1])
            if pair not in pairs and len(pairs) < MAX_PAIRS:
                pairs.add(pair)
                yield int(a["seq"][at[i]])


def _handler(job: JobState, site: Site | None) -> Handler | None:
    """Return the handler that encloses a call: the line must still make that call."""
    if site is None or job.find_handlers is None or not site.api:
        return None
    handler = job.find_handlers(site.file).get(site.line)
    return handler if handler is not None and site.api.rpartition(".")[2] in handler.call else None


def _finding(job: JobState, group: GroupId, present: dict[int, Operation], handled: dict[int, Handler]) -> Finding:
    ranks = tuple(sorted(handled))
    known = job.group(group)
    mine, handler = present[ranks[0]], handled[ranks[0]]
    others = {rank: operation for rank, operation in present.items() if rank not in handled}
    theirs = others[min(others)]
    return Finding(
        kind="collective-in-except",
        severity="warning" if handler.is_finally else "info",
        summary=f"{capitalised(ranks)} made {mine.op} #{mine.seq} of {group_words(known)}{at_line(mine.site)} in "
        f"{_block_words(handler)}; it met the call{at_line(theirs.site)} of "
        f"{list_ranks(tuple(others))}, and the job did not hang.",
        culprit_ranks=ranks,
        grade=0.7,
        group=known,
        op=mine.op,
        seq=mine.seq,
        step=mine.step,
        call_sites=call_sites(others),
        culprit_call_sites=call_sites({rank: present[rank] for rank in ranks}),
        evidence=("an exception is the business of one rank: the others reached this position at another line",),
        advice=(
            "Where the two calls are not meant for each other, or the exception may come after the other call, make "
            "one call behind the try statement, by which all ranks learn of the failure.",
        ),
    )


RULES: Declared = (
    Rule(kinds=("collective-in-except",), stages=(Stage.NOTE,), find=find_handled),
    Rule(kinds=("collective-in-except",), stages=(Stage.BESIDE_CRASH,), find=find_beside_crash),
)
