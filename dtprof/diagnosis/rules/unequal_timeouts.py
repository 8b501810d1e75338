"""Members or groups give up after different times: a note."""

from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, group_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.groups import GroupId

DEFAULT_TIMEOUTS_S = (600.0, 1800.0)
"""Default timeouts of groups in torch, on NCCL and elsewhere."""


def find_unequal_timeouts(case: Case) -> Iterator[Finding]:
    """Give a note for each group whose members give up after different times."""
    job = case.job
    limits: dict[GroupId, dict[int, float]] = {}
    for rank in job.ranks.values():
        for key, group in rank.groups.items():
            if group.timeout_s is not None:
                limits.setdefault(key, {})[rank.rank] = group.timeout_s
    for key, own in limits.items():
        if len(set(own.values())) > 1:
            least, most = min(own.values()), max(own.values())
            first = tuple(sorted(rank for rank, limit in own.items() if limit == least))
            known = job.group(key)
            yield Finding(
                kind="unequal-timeouts",
                severity="info",
                summary=f"Operations of {group_words(known)} may take {least:,.0f} s on {list_ranks(first)}, and up to "
                f"{most:,.0f} s on its other members.",
                culprit_ranks=first,
                confidence=0.9,
                group=known,
                advice=("Pass the same timeout on every rank.",),
            )


def find_short_timeouts(case: Case) -> Iterator[Finding]:
    """Give a note where groups have torch's own limit, and the default group a longer one: they do not inherit it."""
    known = {key: group for rank in case.job.ranks.values() for key, group in rank.groups.items()}
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


RULES: Declared = tuple(
    Rule(kinds=("unequal-timeouts",), stages=(Stage.RISK,), find=find)
    for find in (find_unequal_timeouts, find_short_timeouts)
)
