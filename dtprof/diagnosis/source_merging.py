"""One verdict out of several sources: records, Flight Recorder dumps and logs of the same job."""

from collections.abc import Iterator, Sequence
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
    caveats = [text for verdict in verdicts if verdict is not main for text in _unlike(main, verdict)]
    for verdict in telling:
        if verdict is main:
            continue
        other = verdict.findings[0]
        source = ", ".join(verdict.source)
        if _agree(findings[0], other):
            findings[0] = replace(findings[0], evidence=(*findings[0].evidence, f"{source}: {other.summary}"))
        else:
            blamed = rank_list(other.culprit_ranks) if other.culprit_ranks else "no rank"
            caveats.append(f"{source} blames {blamed} ({other.kind}): {other.summary}")
    seen = {rank for verdict in verdicts for rank in verdict.ranks_seen}
    missing = {rank for verdict in verdicts for rank in verdict.ranks_missing} - seen
    others = telling or verdicts
    reasons = (verdict.cannot_tell for verdict in (main, *(v for v in verdicts if v is not main and v in others)))
    return Verdict(
        outcome=main.outcome,
        source=tuple(source for verdict in verdicts for source in verdict.source),
        ranks_seen=tuple(sorted(seen)),
        ranks_missing=tuple(sorted(missing)),
        findings=tuple(findings),
        cannot_tell=(*caveats, *(text for texts in reasons for text in texts)),
    )


def _unlike(main: Verdict, other: Verdict) -> Iterator[str]:
    """Yield what speaks against two sources being of one job."""
    ours, theirs = (", ".join(verdict.source) for verdict in (main, other))
    ranks = {", ".join(verdict.source): {*verdict.ranks_seen, *verdict.ranks_missing} for verdict in (main, other)}
    run, dumps = ranks.get("run", set()), ranks.get("flight_recorder", set())
    if run and dumps - run:
        yield f"the dumps are of {len(dumps)} ranks, the run of {len(run)}: not of one job; give what belongs together"
    elif main.outcome in ("hang", "crash") and other.outcome == "healthy" and theirs == "run":
        yield f"the run given shows a job in which nothing went wrong: is it the one that {ours} tells of?"


def _weight(verdict: Verdict) -> tuple[bool, float]:
    first = verdict.findings[0]
    return first.kind in ENDED, first.confidence


def _plain(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the first that can tell the outcome."""
    return next((verdict for verdict in verdicts if verdict.outcome != "unknown"), verdicts[0])


def _agree(one: Finding, other: Finding) -> bool:
    ours, theirs = set(one.culprit_ranks), set(other.culprit_ranks)
    return not theirs or not ours or bool(ours & theirs) or (one.kind in ENDED and bool(ours & {*other.waiting_ranks}))
