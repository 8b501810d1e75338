"""One verdict out of several sources: records, Flight Recorder dumps and logs of the same job."""

from collections.abc import Sequence
from dataclasses import replace

from dtprof.diagnosis.findings import Finding, Verdict, rank_list

ENDED = ("rank-crashed", "rank-killed", "rank-exited")


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Return one verdict; the sources come in the order in which they are trusted.

    A source that saw a rank end explains one that saw others wait for it. Sources that name other ranks are heard in
    `cannot_tell`: one of them is wrong.
    """
    if len(verdicts) == 1:
        return verdicts[0]
    telling = [verdict for verdict in verdicts if verdict.faults]
    main = max(telling, key=_weight) if telling else _plain(verdicts)
    findings = list(main.findings)
    doubts: list[str] = []
    for verdict in telling:
        if verdict is main:
            continue
        other = verdict.findings[0]
        source = ", ".join(verdict.source)
        if _agree(findings[0], other):
            findings[0] = replace(findings[0], evidence=(*findings[0].evidence, f"{source}: {other.summary}"))
        else:
            blamed = rank_list(other.culprit_ranks) if other.culprit_ranks else "no rank"
            doubts.append(f"{source} blames {blamed} ({other.kind}): {other.summary}")
    seen = {rank for verdict in verdicts for rank in verdict.ranks_seen}
    missing = {rank for verdict in verdicts for rank in verdict.ranks_missing} - seen
    reasons = (verdict.cannot_tell for verdict in (main, *(v for v in verdicts if v is not main and v in telling)))
    return Verdict(
        outcome=main.outcome,
        source=tuple(source for verdict in verdicts for source in verdict.source),
        ranks_seen=tuple(sorted(seen)),
        ranks_missing=tuple(sorted(missing)),
        findings=tuple(findings),
        cannot_tell=(*doubts, *(text for texts in reasons for text in texts)),
    )


def _weight(verdict: Verdict) -> tuple[bool, float]:
    first = verdict.findings[0]
    return first.kind in ENDED, first.confidence


def _plain(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the first that can tell the outcome."""
    return next((verdict for verdict in verdicts if verdict.outcome != "unknown"), verdicts[0])


def _agree(one: Finding, other: Finding) -> bool:
    ours, theirs = set(one.culprit_ranks), set(other.culprit_ranks)
    return not theirs or not ours or bool(ours & theirs) or (one.kind in ENDED and bool(ours & {*other.waiting_ranks}))
