"""Mismatches that `dtprof run` reported while the job ran, and that the diagnosis of its records does not repeat.

It does not where the ranks went on and the records have been dropped since, and in a running job between two diagnoses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtprof.diagnosis.findings import Finding, Verdict


@dataclass(frozen=True, kw_only=True)
class ReportedMismatch:
    """Mismatched operations at one sequence number of a group."""

    kind: str
    group: str
    seq: int
    summary: str
    after_s: float | None  # since the start of the job


def key_of(finding: Finding) -> tuple[str, str, int]:
    """Return what the files of the nodes call a mismatch: its kind, the name of the group and the position in it."""
    return finding.kind, finding.group.name if finding.group is not None else "", finding.seq or 0


def seconds_after_start(row: Mapping[str, Any], started_ns: int | None) -> float | None:
    """Return how long after the start of the job a mismatch was reported, by the time of day: hosts share no other."""
    reported_ns = row.get("realtime_ns")
    return (reported_ns - started_ns) / 1e9 if started_ns and isinstance(reported_ns, int) else None


def list_reported(
    rows: Sequence[Mapping[str, Any]], verdict: Verdict | None, *, started_ns: int | None
) -> tuple[ReportedMismatch, ...]:
    """Return the mismatches of which the verdict says nothing, in the order in which they were reported.

    Parameters:
        rows: of the files of the nodes, as they are read: any of their values may be missing.
        started_ns: when the job was started, by the time of day; 0 or None where that is not known.
    """
    findings = verdict.findings if verdict is not None else ()
    known = set(map(key_of, findings))
    unrepeated: dict[tuple[str, str, int], ReportedMismatch] = {}
    for row in rows:
        kind, group, seq, summary = (row.get(name) for name in ("kind", "group", "seq", "summary"))
        if not isinstance(kind, str) or not isinstance(group, str) or not isinstance(summary, str):
            continue
        key = (kind, group, seq if isinstance(seq, int) else 0)
        if key not in known and key not in unrepeated:
            after_s = seconds_after_start(row, started_ns)
            unrepeated[key] = ReportedMismatch(kind=kind, group=group, seq=key[2], summary=summary, after_s=after_s)
    return tuple(unrepeated.values())
