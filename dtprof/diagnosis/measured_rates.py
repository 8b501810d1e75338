"""How often findings are right, measured on generated programs: what the grade of a rule is worth.

A rule grades its evidence by a number of its own (`Finding.confidence`). Kind and grade are a class of evidence; of the
classes that generated programs reach, the measured rate takes the place of the grade. Others keep it as a judgement.

To measure anew: `python -m tests.faults.generated --grades`, on seeds that check no rates.
"""

from collections.abc import Mapping
from dataclasses import replace

from dtprof.diagnosis.findings import Finding

Rates = Mapping[tuple[str, float], float]
"""By kind and grade: the share of findings with the right kind and culprits."""

RATES: Rates = {}
MEASURED_SOURCES = ("run",)
"""Generated programs are runs; logs and dumps know less, and their rules grade what they lack."""


def with_measured_rate(finding: Finding, sources: tuple[str, ...], rates: Rates) -> Finding:
    """Return a finding as sure as those of its class are right."""
    rate = rates.get((finding.kind, round(finding.confidence, 2))) if sources == MEASURED_SOURCES else None
    return replace(finding, confidence=rate) if rate is not None else finding
