"""The step of every rank as a stacked bar: by its exact parts, which sum to the step, or by phases."""

from collections.abc import Mapping, Sequence
from typing import Any

from dtprof.analysis.results import PARTS, PHASES, Summary
from dtprof.report.figures.drawing import Drawing, Nothing, bars, new_figure, rank_names, stack_bars
from dtprof.report.figures.figure_numbers import (
    DURATIONS,
    Unit,
    choose_decimals,
    choose_unit,
    format_duration,
    format_share,
)
from dtprof.report.figures.palette import hue_of

MAX_LYING_BARS = 16
"""Ranks up to which bars are horizontal, one line a rank; more ranks have vertical bars."""


def draw_step_parts(summary: Summary) -> Drawing | Nothing:
    """Draw the parts of the mean step of every rank."""
    return draw_stacks(
        title="Step time of each rank by part",
        names=PARTS,
        stacks={rank.rank: rank.partition_ns for rank in summary.ranks if rank.partition_ns and rank.step_ns},
        steps={rank.rank: rank.step_ns for rank in summary.ranks if rank.step_ns},
        nothing=Nothing(
            why="No step could be split into its parts.",
            remedy="Let the job end at least two optimizer steps on every rank.",
        ),
    )


def draw_step_phases(summary: Summary) -> Drawing | Nothing:
    """Draw the phases of the mean step of every rank, communication inside them."""
    return draw_stacks(
        title="Step time of each rank by phase",
        names=PHASES,
        stacks={rank.rank: rank.phases_ns for rank in summary.ranks if rank.phases_ns and rank.step_ns},
        steps={rank.rank: rank.step_ns for rank in summary.ranks if rank.step_ns},
        nothing=Nothing(
            why="No phases were recorded.",
            remedy="Phases come from torch.optim, torch.utils.data and backward(): use them in the training loop.",
        ),
    )


def draw_stacks(
    *,
    title: str,
    names: Sequence[str],
    stacks: Mapping[int, Mapping[str, int | None]],
    steps: Mapping[int, int],
    nothing: Nothing,
) -> Drawing | Nothing:
    """Draw one stacked bar a rank; `stacks` gives nanoseconds by rank and name, `steps` the whole step.

    What is None is not known: it has no length, and its text says so. Without ranks, there is `nothing` to draw.
    """
    ranks = sorted(stacks)
    if not ranks:
        return nothing
    steps = {rank: steps[rank] for rank in ranks}
    shown = [name for name in names if any(stacks[rank].get(name, 0) for rank in ranks)]
    unit = choose_unit(steps.values(), DURATIONS)
    lying = len(ranks) <= MAX_LYING_BARS
    time_title = f"time per step ({unit.name}, mean of the measured steps)"
    figure = new_figure(
        title=title,
        x_title=time_title if lying else "rank",
        y_title="" if lying else time_title,
        height=104 + 34 * len(ranks) if lying else 400,
    )
    for name in shown:
        figure.add_trace(_bars(name, ranks, stacks, steps, unit, lying))
    stack_bars(figure, gap=0.28 if lying else 0.12, lying=lying)
    return Drawing(
        plot=figure,
        sentence=" ".join((f"{title}: {_describe_extremes(steps)}", *_describe_unknown(names, stacks, ranks))),
        columns=("rank", f"step ({unit.name})", *(f"{hue_of(name).label} ({unit.name})" for name in shown)),
        rows=_rows(ranks, shown, stacks, steps, unit),
    )


def _bars(
    name: str,
    ranks: Sequence[int],
    stacks: Mapping[int, Mapping[str, int | None]],
    steps: Mapping[int, int],
    unit: Unit,
    lying: bool,
) -> Any:
    hue = hue_of(name)
    spent = [stacks[rank].get(name, 0) for rank in ranks]
    return bars(
        hue.label,
        name,
        rank_names(ranks) if lying else list(ranks),
        [(ns or 0) / unit.size for ns in spent],
        [
            f"<b>rank {rank}: {hue.label}</b><br>{_describe_length(ns, steps[rank])}<br>{hue.meaning}"
            for rank, ns in zip(ranks, spent, strict=True)
        ],
        lying=lying,
        customdata=list(ranks),
    )


def _describe_extremes(steps: Mapping[int, int]) -> str:
    shortest, longest = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if len(steps) == 1:
        return f"rank {shortest} takes {format_duration(steps[shortest])} a step."
    if format_duration(steps[shortest]) == format_duration(steps[longest]):
        return f"{format_duration(steps[shortest])} on every rank."
    return (
        f"from {format_duration(steps[shortest])} on rank {shortest} "
        f"to {format_duration(steps[longest])} on rank {longest}."
    )


def _describe_length(ns: int | None, step_ns: int) -> str:
    of_step = f"of a step of {format_duration(step_ns)}"
    return (
        f"{format_duration(ns)}, {format_share(ns / step_ns)} {of_step}" if ns is not None else f"not known, {of_step}"
    )


def _describe_unknown(
    names: Sequence[str], stacks: Mapping[int, Mapping[str, int | None]], ranks: Sequence[int]
) -> list[str]:
    unknown = {name: [rank for rank in ranks if stacks[rank].get(name, 0) is None] for name in names}
    return [
        f"Not known on {'every rank' if len(some) == len(ranks) else f'{len(some):,} of {len(ranks):,} ranks'}: "
        f"{hue_of(name).label}."
        for name, some in unknown.items()
        if some
    ]


def _rows(
    ranks: Sequence[int],
    names: Sequence[str],
    stacks: Mapping[int, Mapping[str, int | None]],
    steps: Mapping[int, int],
    unit: Unit,
) -> tuple[tuple[str, ...], ...]:
    decimals = choose_decimals([step / unit.size for step in steps.values()])
    return tuple(
        (
            str(rank),
            f"{steps[rank] / unit.size:.{decimals}f}",
            *(
                "\u2013" if (ns := stacks[rank].get(name, 0)) is None else f"{ns / unit.size:.{decimals}f}"
                for name in names
            ),
        )
        for rank in ranks
    )
