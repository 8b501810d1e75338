"""The input of figures and pages."""

from dataclasses import dataclass

from dtprof.analysis.comparison.run_comparison import Comparison
from dtprof.analysis.memory.device_series import NodeSeries
from dtprof.analysis.results import Summary
from dtprof.analysis.timeline.run_closeup import Closeup
from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.reported_mismatches import ReportedMismatch


@dataclass(frozen=True, kw_only=True)
class Source:
    """Results of a run; where one is None, the figures that need it give the reason."""

    summary: Summary
    closeup: Closeup | None = None
    verdict: Verdict | None = None
    comparison: Comparison | None = None
    nodes: NodeSeries | None = None
    reported: tuple[ReportedMismatch, ...] = ()  # while the job ran, beyond what the verdict says

    @property
    def available(self) -> tuple[str, ...]:
        """Optional subjects of pages."""
        has_finding = (self.verdict is not None and bool(self.verdict.findings)) or bool(self.reported)
        return tuple(
            name for name, there in (("finding", has_finding), ("comparison", self.comparison is not None)) if there
        )
