"""Score `diagnose_logs` over a folder of labelled logs: `python -m tests.diagnosis.evaluate_logs FOLDER [--verbose]`.

A label NNN.json stands beside NNN.log. Of its `expected` these are read: `suspect_ranks` (numbers; words or nothing:
nobody can be named), `nameable_from_log_alone` (yes, partial, no), `confidence` (none: nobody can be named),
`timed_out_ranks`, `op`, `seq`, `cause` (ids of the taxonomy of causes).
"""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.sources.logs.logged_job import operation
from dtprof.session.job_diagnosis import diagnose_logs

SURE = 0.5
NETWORK = "T37"
KINDS = {
    "T01": ("rank-skipped-collective", "collective-order-mismatch"),
    "T02": ("rank-skipped-collective", "collective-order-mismatch"),
    "T03": ("rank-skipped-collective", "collective-order-mismatch", "uneven-inputs"),
    "T04": ("rank-exited", "rank-skipped-collective", "collective-order-mismatch"),
    "T05": ("size-mismatch", "rank-skipped-collective", "collective-order-mismatch"),
    "T06": ("collective-order-mismatch",),
    "T07": ("group-order-inversion",),
    "T08": ("collective-order-mismatch",),
    "T09": ("size-mismatch",),
    "T10": ("dtype-mismatch", "size-mismatch"),
    "T11": ("root-mismatch",),
    "T12": ("reduce-op-mismatch",),
    "T13": ("split-size-mismatch", "size-mismatch"),
    "T14": ("p2p-unmatched", "p2p-tag-mismatch", "p2p-size-mismatch"),
    "T15": ("p2p-deadlock-cycle",),
    "T17": ("group-creation-mismatch", "rank-never-joined"),
    "T20": ("rank-never-joined",),
    "T23": ("rank-skipped-collective",),
    "T25": ("rank-stuck", "rank-skipped-collective"),
    "T26": ("long-operation", "rank-skipped-collective"),
    "T28": ("rank-stuck",),
    "T30": ("rank-stuck",),
    "T31": ("rank-crashed",),
    "T32": ("rank-killed",),
    "T33": ("rank-crashed", "rank-killed"),
    "T34": ("rank-exited",),
    "T37": ("backend-stall",),
}


@dataclass(frozen=True, kw_only=True)
class Score:
    """How a verdict compares with its label."""

    ranks: str  # right, abstained, wrong; "sure and wrong" is what must not happen
    knowable: bool
    kind_fits: bool | None
    op_fits: bool | None
    seq_fits: bool | None
    waiting_fits: bool | None


def score(verdict: Verdict, expected: dict[str, Any]) -> Score:
    """Compare a verdict with what its label expects."""
    suspects = expected.get("suspect_ranks", [])
    named = {rank for rank in suspects if isinstance(rank, int)} if all(isinstance(r, int) for r in suspects) else set()
    cause = str(expected.get("cause") or "")
    unknown = expected.get("nameable_from_log_alone") == "no" or str(expected.get("confidence")).startswith("none")
    finding = verdict.findings[0] if verdict.findings else None
    culprits = set(finding.culprit_ranks) if finding else set()
    sure = finding is not None and finding.confidence >= SURE
    if culprits and culprits == named:
        ranks = "right"
    elif not culprits:
        ranks = "right" if not named or (unknown and not sure) else "abstained"
    else:
        ranks = "sure and wrong" if sure else "wrong"
    late = expected.get("timed_out_ranks")
    return Score(
        ranks=ranks,
        knowable=bool(named) and not unknown,
        kind_fits=_kind_fits(finding, cause),
        op_fits=_op_fits(verdict, str(expected.get("op") or "")),
        seq_fits=_fits(finding and finding.seq, expected.get("seq") if late else None),
        waiting_fits=_fits(finding and set(finding.waiting_ranks), set(late) if late else None),
    )


def _fits(found: object, wanted: object) -> bool | None:
    return None if wanted is None else found == wanted


def _op_fits(verdict: Verdict, label: str) -> bool | None:
    """Say whether the operation is one that the label names: of two that meet, `A vs B`, both are right.

    A verdict without a finding names it in its reasons, if at all.
    """
    wanted = {name for word in re.split(r"[ /]", label) if (name := operation(word)) is not None}
    if not wanted:
        return None
    if verdict.findings:
        return verdict.findings[0].op in wanted
    named = {name for word in re.findall(r"\w+", " ".join(verdict.cannot_tell)) if (name := operation(word))}
    return named == wanted


def _kind_fits(finding: Finding | None, cause: str) -> bool | None:
    wanted = {kind for one in cause.split("|") for kind in KINDS.get(one, ())}
    return finding.kind in wanted if wanted and finding is not None else None


def main() -> int:
    """Print one line for each log and the sums; status 1 where a verdict was sure and wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    scores: list[Score] = []
    for label in sorted(arguments.folder.glob("*.json")):
        log = label.with_suffix(".log")
        if not log.exists():
            continue
        expected = json.loads(label.read_text(encoding="utf-8"))["expected"]
        verdict = diagnose_logs([log])
        one = score(verdict, expected)
        scores.append(one)
        finding = verdict.findings[0] if verdict.findings else None
        said = f"{finding.kind} {list(finding.culprit_ranks)} {finding.confidence}" if finding else "-"
        wanted = f"{expected.get('suspect_ranks')} {expected.get('cause')} {expected.get('confidence', '')}"
        mark = "" if one.knowable else " (cannot be known)"
        print(f"{label.stem}: {one.ranks}{mark}: {verdict.outcome}, {said}; label {wanted}")
        if arguments.verbose:
            print(f"    {one}\n    {finding.summary if finding else verdict.cannot_tell}")
    for knowable in (True, False):
        counts = Counter(one.ranks for one in scores if one.knowable is knowable)
        print(f"culprit {'can' if knowable else 'cannot'} be known: {dict(counts)}")
    for name in ("kind_fits", "op_fits", "seq_fits", "waiting_fits"):
        told = [value for one in scores if (value := getattr(one, name)) is not None]
        print(f"{name}: {sum(told)} of {len(told)}")
    return 1 if any(one.ranks == "sure and wrong" for one in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
