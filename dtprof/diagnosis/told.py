"""Mismatches that `dtprof run` told of while the job ran, and that the diagnosis of its records does not repeat.

It does not where the ranks went on and the records have been dropped since, and in a running job between two diagnoses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtprof.diagnosis.findings import Verdict


@dataclass(frozen=True, kw_only=True)
class ToldMismatch:
    """Calls at one position of a group that do not go together."""

    kind: str
    group: str
    seq: int
    summary: str
    after_s: float | None  # since the start of the job


def list_told(
    rows: Sequence[Mapping[str, Any]], verdict: Verdict | None, *, started_ns: object
) -> tuple[ToldMismatch, ...]:
    """Return the mismatches of which the verdict says nothing, in the order in which they were told of.

    Parameters:
        rows: of the files of the nodes, as they are read: any of their values may be missing.
        started_ns: when the job was started, where that is known, by the time of day: rows may be of several hosts.
    """
    findings = verdict.findings if verdict is not None else ()
    known = {(one.kind, one.group.name if one.group else "", one.seq or 0) for one in findings}
    found: dict[tuple[str, str, int], ToldMismatch] = {}
    for row in rows:
        kind, group, seq, summary = (row.get(name) for name in ("kind", "group", "seq", "summary"))
        if not isinstance(kind, str) or not isinstance(group, str) or not isinstance(summary, str):
            continue
        key = (kind, group, seq if isinstance(seq, int) else 0)
        t_ns = row.get("realtime_ns")
        after = (t_ns - started_ns) / 1e9 if isinstance(t_ns, int) and isinstance(started_ns, int) else None
        if key not in known and key not in found:
            found[key] = ToldMismatch(kind=kind, group=group, seq=key[2], summary=summary, after_s=after)
    return tuple(found.values())
