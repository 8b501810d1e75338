"""The lines at which late ranks were sampled while the job ran, from the files of the nodes."""

from dataclasses import dataclass
from pathlib import Path

from dtprof.formatting import format_fraction
from dtprof.records import paths
from dtprof.records.rank_log.strings import json_lines


@dataclass(frozen=True, kw_only=True)
class SampledLine:
    """A line of the program at which a late rank spends more of its time than one that is on time."""

    file: str
    line: int
    function: str
    share: float  # of its time, more than the other
    does: str  # what it does there, a clause

    @property
    def words(self) -> str:
        """Say where it is, for how much longer than the other, and what it does there."""
        share = format_fraction(self.share, 0)
        place = f"{self.file}:{self.line} ({self.function})"
        return f"at {place}, {share} of its time longer than a rank that is on time: {self.does}"


def read_late_lines(run: Path) -> dict[int, SampledLine]:
    """Return the newest sampled line of each rank; rows that are no such are left out."""
    found: dict[int, tuple[int, SampledLine]] = {}
    for node in sorted(run.glob("node-*")):
        for row in json_lines(node / paths.LATENESS, []):
            try:
                t_ns, rank = int(row["t_ns"]), int(row["rank"])
                line = SampledLine(
                    file=str(row["file"]),
                    line=int(row["line"]),
                    function=str(row["function"]),
                    share=float(row["share"]),
                    does=str(row["does"]),
                )
            except (KeyError, TypeError, ValueError, OverflowError):
                continue
            if rank not in found or found[rank][0] <= t_ns:
                found[rank] = t_ns, line
    return {rank: line for rank, (_, line) in found.items()}
