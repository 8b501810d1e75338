"""The rules in order, and the outcome."""

from dataclasses import replace

from dtprof.diagnosis import divergence, endings, stalls
from dtprof.diagnosis.evidence import Evidence
from dtprof.diagnosis.findings import Finding, Verdict

CRASHES = {"rank-crashed", "rank-killed"}


def decide(evidence: Evidence, source: tuple[str, ...]) -> Verdict:
    """Return the verdict: ends first, then ways that part, then who does not come; else why it cannot be told."""
    finding = _first_cause(evidence)
    findings = (finding,) if finding is not None else ()
    outcome, reasons = _outcome(evidence, finding)
    return Verdict(
        outcome=outcome,
        source=source,
        ranks_seen=tuple(sorted(evidence.ranks)),
        ranks_missing=evidence.missing,
        findings=findings,
        cannot_tell=(*reasons, *evidence.problems),
    )


def _first_cause(evidence: Evidence) -> Finding | None:
    ended = endings.find_ending(evidence)
    if ended is not None and not endings.died_in_operation(evidence, ended):
        return ended
    if ended is None and not evidence.stalled:
        return None
    fronts = divergence.find_fronts(evidence)
    parted = divergence.find_skip(evidence, fronts) or divergence.find_mismatch(evidence, fronts)
    if ended is not None:
        # A back end may abort the process that receives what does not fit: then the end is a consequence.
        return ended if parted is None else replace(parted, evidence=(*parted.evidence, ended.summary))
    return (
        parted
        or stalls.find_absent(evidence, fronts)
        or stalls.find_never_joined(evidence)
        or stalls.find_backend_stall(evidence, fronts)
    )


def _outcome(evidence: Evidence, finding: Finding | None) -> tuple[str, tuple[str, ...]]:
    if finding is not None:
        if finding.kind == "long-operation":
            return "slow", ()
        failed = any(rank.exceptions for rank in evidence.ranks.values())
        is_crash = finding.kind in CRASHES or (failed and evidence.stopped_on_hang_ns is None)
        return ("crash" if is_crash else "hang"), ()
    status = evidence.manifest.exit_status
    if not evidence.ranks:
        return "unknown", ("no rank left a record: there is nothing to diagnose",)
    if status not in (None, 0):
        stopped = [rank.rank for rank in evidence.ranks.values() if rank.stopped_politely]
        if stopped or status in (-2, -15, 130, 143):
            return "unknown", (
                "the job was stopped from outside (SIGINT or SIGTERM); nothing wrong was seen before that",
            )
        return "unknown", (f"the job ended with exit status {status}, and no record shows why",)
    if evidence.stalled:
        return "unknown", ("ranks wait, and the records do not show for whom: take stacks (py-spy dump) of every rank",)
    return "healthy", ()
