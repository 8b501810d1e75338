"""What is no fault, and worth knowing before it becomes one: limits that differ, several threads on one group.

These are notes, of severity `info`: right programs do so, too. Threads whose calls met in another order on another rank
are no note but an error.
"""

from collections.abc import Iterable

import numpy as np

from dtprof.diagnosis.findings import Finding, at_line, group_words, rank_list
from dtprof.diagnosis.job_state import Evidence
from dtprof.diagnosis.rules.argument_mismatches import at_position, group_tables
from dtprof.diagnosis.rules.rank_deaths import call_sites
from dtprof.job.groups import GroupId
from dtprof.records import codes
from dtprof.records.tables import Array, select

DEFAULT_TIMEOUTS_S = (600.0, 1800.0)
"""What torch gives groups made without a limit, on NCCL and elsewhere."""
MIN_TURNS = 3
"""Changes from thread to thread that are more than handing the group over."""


def find_thread_order(evidence: Evidence) -> Finding | None:
    """Return the finding for the first position that calls of different threads met at."""
    found = [
        finding for group, tables in group_tables(evidence).items() if (finding := _crossed(evidence, group, tables))
    ]
    return min(found, key=lambda finding: finding.step or 0, default=None)


def find_hazards(evidence: Evidence) -> list[Finding]:
    """Return the notes on a job that goes well."""
    return [*_find_unequal_timeouts(evidence), *_find_short_timeouts(evidence), *_find_shared_groups(evidence)]


def _own_calls(table: Array) -> Array:
    """Return the calls of threads of the program: those of autograd's own are made while another waits for them."""
    known = (table["place"] != 0) & (table["thread"] != 0)
    return select(table, known & ((table["flags"] & codes.INFERRED_SITE) == 0))


def _is_of_one_thread(table: Array) -> bool:
    return bool((table["thread"] == table["thread"][:1]).all())


def _crossed(evidence: Evidence, group: GroupId, tables: dict[int, Array]) -> Finding | None:
    if any(_is_of_one_thread(table) for table in tables.values()):
        return None
    calls = {rank: _own_calls(table) for rank, table in tables.items()}
    if any(_is_of_one_thread(table) for table in calls.values()):
        return None
    (first, reference), *others = calls.items()
    for rank, table in others:
        _, mine, theirs = np.intersect1d(reference["seq"], table["seq"], return_indices=True)
        a, b = reference[mine], table[theirs]
        for at in np.flatnonzero((a["place"] != b["place"]) & (a["op"] == b["op"]))[:1].tolist():
            places = (int(a["place"][at]), int(b["place"][at]))
            if _by_two_threads(reference, places) and _by_two_threads(table, places):
                return _crossed_finding(evidence, group, tables, (first, rank), int(a["seq"][at]))
    return None


def _by_two_threads(table: Array, places: tuple[int, int]) -> bool:
    """Say whether a rank calls at both places, each from a thread of its own."""
    one, other = (set(table["thread"][table["place"] == place].tolist()) for place in places)
    return bool(one) and bool(other) and not one & other


def _crossed_finding(
    evidence: Evidence, group: GroupId, tables: dict[int, Array], ranks: tuple[int, int], seq: int
) -> Finding:
    present = at_position(evidence, {rank: tables[rank] for rank in ranks}, seq)
    known = evidence.group(group)
    facts = [f"rank {r}: {o.op}{at_line(o.site)}, thread {o.thread}" for r, o in present.items()]
    return Finding(
        kind="step-mismatch",
        summary=f"At #{seq} of {group_words(known)} calls of different threads meet on {rank_list(ranks)}: "
        "threads issue on one group in no fixed order, and results are mixed up.",
        culprit_ranks=tuple(sorted(tables)),
        confidence=0.85,
        group=known,
        op=present[ranks[0]].op,
        seq=seq,
        step=present[ranks[0]].step,
        culprit_call_sites=call_sites(present),
        evidence=tuple(facts),
        advice=("Give each thread a group of its own, or let one thread make all calls of a group.",),
    )


def _find_shared_groups(evidence: Evidence) -> Iterable[Finding]:
    """Give a note for each group that threads of a rank issue on by turns."""
    for group, tables in group_tables(evidence).items():
        calls = {r: _own_calls(table)["thread"] for r, table in tables.items() if not _is_of_one_thread(table)}
        ranks = tuple(r for r, threads in sorted(calls.items()) if int((np.diff(threads) != 0).sum()) >= MIN_TURNS)
        if ranks:
            known = evidence.group(group)
            number = max(len(np.unique(calls[rank])) for rank in ranks)
            yield Finding(
                kind="shared-group",
                severity="info",
                summary=f"{number} threads issue on {group_words(known)} by turns on {rank_list(ranks)}; it went well: "
                "all ranks took them in one order.",
                culprit_ranks=ranks,
                confidence=0.7,
                group=known,
                advice=("Where nothing fixes their order, give each thread a group of its own.",),
            )


def _find_unequal_timeouts(evidence: Evidence) -> Iterable[Finding]:
    """Give a note for each group whose members give up after different times."""
    limits: dict[GroupId, dict[int, float]] = {}
    for rank in evidence.ranks.values():
        for key, group in rank.groups.items():
            if group.timeout_s is not None:
                limits.setdefault(key, {})[rank.rank] = group.timeout_s
    for key, own in limits.items():
        if len(set(own.values())) > 1:
            least, most = min(own.values()), max(own.values())
            first = tuple(sorted(rank for rank, limit in own.items() if limit == least))
            known = evidence.group(key)
            yield Finding(
                kind="unequal-timeouts",
                severity="info",
                summary=f"Operations of {group_words(known)} may take {least:,.0f} s on {rank_list(first)}, and up to "
                f"{most:,.0f} s on its other members.",
                culprit_ranks=first,
                confidence=0.9,
                group=known,
                advice=("Pass the same timeout on every rank.",),
            )


def _find_short_timeouts(evidence: Evidence) -> Iterable[Finding]:
    """Give a note where groups have torch's own limit, and the default group a longer one: they do not inherit it."""
    known = {key: group for rank in evidence.ranks.values() for key, group in rank.groups.items()}
    limits = [g.timeout_s for g in known.values() if g.description == "default_pg" and g.timeout_s is not None]
    if not limits:
        return
    short = [
        group
        for group in known.values()
        if group.description != "default_pg" and group.timeout_s in DEFAULT_TIMEOUTS_S and group.timeout_s < limits[0]
    ]
    if short:
        words = group_words(short[0]) + (f" and {len(short) - 1} more" if len(short) > 1 else "")
        yield Finding(
            kind="unequal-timeouts",
            severity="info",
            summary=f"Operations of {words} may take {short[0].timeout_s:,.0f} s, those of the default group "
            f"{limits[0]:,.0f} s: new_group does not take over its limit.",
            culprit_ranks=(),
            confidence=0.9,
            group=short[0],
            advice=("Pass timeout to new_group, too.",),
        )
