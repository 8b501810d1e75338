"""Mismatches that `dtprof run` reported while the job ran, and that the diagnosis of its records does not repeat.

It does not where the ranks went on and the records have been dropped since, and in a running job between two diagnoses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtprof.diagnosis.findings import Finding, Verdict


class MismatchKey(NamedTuple):
    """The key of a mismatch in the files of the nodes."""

    kind: str
    group: str
    seq: int
    instance: int = 0  # of the group: one that is created again counts its operations anew

    @classmethod
    def of(cls, finding: Finding) -> "MismatchKey":
        """Return the key of a finding."""
        group = finding.group
        return cls(finding.kind, group.name if group else "", finding.seq or 0, group.instance if group else 0)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "MismatchKey | None":
        """Return the key of a line; None where it names no mismatch: any value may be missing."""
        kind, group, *numbers = (row.get(name) for name in cls._fields)
        if not isinstance(kind, str) or not isinstance(group, str):
            return None
        return cls(kind, group, *(number if isinstance(number, int) else 0 for number in numbers))


@dataclass(frozen=True, kw_only=True)
class ReportedMismatch:
    """Mismatched operations at one sequence number of a group."""

    kind: str
    group: str
    seq: int
    summary: str
    after_s: float | None  # since the start of the job


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
    known = set(map(MismatchKey.of, findings))
    unrepeated: dict[MismatchKey, ReportedMismatch] = {}
    for row in rows:
        key, summary = MismatchKey.read(row), row.get("summary")
        if key is not None and isinstance(summary, str) and key not in known and key not in unrepeated:
            after_s = seconds_after_start(row, started_ns)
            unrepeated[key] = ReportedMismatch(
                kind=key.kind, group=key.group, seq=key.seq, summary=summary, after_s=after_s
            )
    return tuple(unrepeated.values())
