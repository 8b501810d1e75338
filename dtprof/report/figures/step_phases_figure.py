"""The step of every rank as one bar, split into phases: what the program was doing, communication inside."""

from dtprof.analysis.results import PHASES, Summary
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.stacked_step_figure import draw_stacks


def draw_step_phases(summary: Summary) -> Drawing | Nothing:
    """Draw the phases of the mean step of every rank."""
    known = [(rank, rank.phases_ns) for rank in summary.ranks if rank.phases_ns and rank.step_ns]
    if not known:
        return Nothing(
            why="No phases were recorded.",
            remedy="Phases come from torch.optim, torch.utils.data and backward(): use them in the training loop.",
        )
    return draw_stacks(
        title="Step time of each rank by phase",
        names=PHASES,
        stacks={rank.rank: phases for rank, phases in known},
        steps={rank.rank: rank.step_ns or 0 for rank, _ in known},
    )
