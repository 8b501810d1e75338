"""The step of every rank as one bar, split into the exact partition of DEFINITIONS: the bars sum to the step."""

from dtprof.analysis.results import PARTS, Summary
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.stacked_step_figure import draw_stacks


def draw_step_parts(summary: Summary) -> Drawing | Nothing:
    """Draw the parts of the mean step of every rank."""
    known = [(rank, rank.partition_ns) for rank in summary.ranks if rank.partition_ns and rank.step_ns]
    if not known:
        return Nothing(
            why="No step could be split into its parts.",
            remedy="Let the job end at least two optimizer steps on every rank.",
        )
    return draw_stacks(
        title="Step time of each rank by part",
        names=PARTS,
        stacks={rank.rank: parts for rank, parts in known},
        steps={rank.rank: rank.step_ns or 0 for rank, _ in known},
    )
