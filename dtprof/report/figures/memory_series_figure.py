"""The memory of the worst rank over the run: measured, by formula, and the phases of its steps under it."""

from dtprof.analysis.memory.memory_series import MemorySeries, SampleSeries
from dtprof.analysis.results import PHASES, MemoryFormula, MemoryGrowth
from dtprof.analysis.steps.phase_series import StepPhases
from dtprof.records import events
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, axis_below, bars, new_figure
from dtprof.report.figures.figure_numbers import DURATIONS, SIZES, Unit, choose_unit, format_bytes, format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.plot import Plot, new_trace

FEW_SAMPLES = 60
"""Up to so many each is marked."""
NUM_HUES = 3
"""Samples that are neither the total nor a category."""
_CATEGORIES = {sample: f"memory {category}" for category, sample in events.MEMORY_CATEGORIES.items()}
_OF_ALLOCATOR = (events.CUDA_ALLOCATED_BYTES, events.CUDA_PEAK_ALLOCATED_BYTES)
_BESIDE_A_DEVICE = (
    events.RSS_BYTES,
    events.PEAK_RSS_BYTES,
    events.USS_BYTES,
    events.HEAP_BYTES,
    events.CUDA_PEAK_RESERVED_BYTES,
)
"""Where a device's allocator was sampled, these stand in the numbers only: of the host, and a second peak."""
_ABOVE, _BELOW = (0.36, 1.0), (0.0, 0.26)
"""Where memory and phases lie, from bottom to top."""


def draw_memory_series(source: Source) -> Drawing | Nothing:
    """Draw the samples of the rank with the highest peak over the steps, and the phases of those steps."""
    memory = source.closeup.memory if source.closeup else MemorySeries()
    worst = memory.worst
    worst_rank = memory.ranks.get(worst) if worst is not None else None
    result = next((rank for rank in source.summary.ranks if rank.rank == worst), None)
    if worst_rank is None or worst_rank.total is None or result is None:
        return Nothing(
            why="Memory was not sampled.",
            remedy="Samples are taken at each step: let the job end one, with an optimizer of torch or dtprof.step().",
        )
    formulas = _formulas(result.memory_formula)
    on_device = worst_rank.total in _OF_ALLOCATOR
    drawn = {
        name: series for name, series in worst_rank.samples.items() if not (on_device and name in _BESIDE_A_DEVICE)
    }
    largest = [series.most for series in drawn.values()]
    unit = choose_unit([*largest, *formulas.values()], SIZES)
    phases = memory.phases
    figure = new_figure(
        title=f"Memory of rank {worst} over the run", x_title="step", y_title=f"memory ({unit.name})",
        height=330 if phases is None else 440,
    )  # fmt: skip
    others = [name for name in drawn if name != worst_rank.total and name not in _CATEGORIES]
    for name, series in drawn.items():
        meta = (
            "ink"
            if name == worst_rank.total
            else _CATEGORIES.get(name) or f"memory sample {others.index(name) % NUM_HUES}"
        )
        _add_series(figure, name, series, unit, meta=meta)
    steps = worst_rank.samples[worst_rank.total].step
    for name, nbytes in formulas.items():
        _add_formula(figure, name, nbytes, unit, (int(steps[0]), int(steps[-1])))
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(showgrid=False)
    if phases is not None:
        _add_phases(figure, phases)
    beside = (
        f" By formula it is {format_bytes(formulas[name])} of {name}." if (name := next(iter(formulas), "")) else ""
    )
    return Drawing(
        plot=figure,
        sentence=f"Rank {worst} has the highest peak, {format_bytes(result.peak_bytes or max(largest))}."
        f"{_describe_growth(result.memory_growth)}{beside}",
        columns=("sample", "samples", "least", "most", "last"),
        rows=(
            *(
                (
                    events.memory_label(name),
                    str(len(series.value)),
                    *(format_bytes(value) for value in (series.least, series.most, series.last)),
                )
                for name, series in worst_rank.samples.items()
            ),
            *((f"{name}, by formula", "", *[format_bytes(nbytes)] * 3) for name, nbytes in formulas.items()),
        ),
        zooms=True,
    )


def _formulas(formula: MemoryFormula | None) -> dict[str, int]:
    """Return the formula's bytes of a rank, by category."""
    if formula is None:
        return {}
    formulas = {"model state": formula.state_formula_bytes}
    if formula.activation_formula_bytes is not None:
        formulas["model state and activations"] = formula.state_formula_bytes + formula.activation_formula_bytes
    return formulas


def _add_series(figure: Plot, name: str, series: SampleSeries, unit: Unit, *, meta: str) -> None:
    word = as_label(events.memory_label(name))
    figure.add_trace(
        new_trace(
            "scatter",
            name=word,
            meta=meta,
            mode="lines+markers" if len(series.step) <= FEW_SAMPLES else "lines",
            line={"width": 2.4 if meta == "ink" else 1.4, "shape": "hv"},
            marker={"size": 4},
            x=series.step,
            y=series.value / unit.size,
            hoverinfo="text",
            hovertext=[
                f"<b>{word}</b><br>{format_bytes(value)} at step {step}"
                for step, value in zip(series.step.tolist(), series.value.tolist(), strict=True)
            ],
        )
    )


def _add_formula(figure: Plot, name: str, nbytes: int, unit: Unit, ends: tuple[int, int]) -> None:
    figure.add_trace(
        new_trace(
            "scatter",
            name=f"{name}, by formula",
            meta="memory formula",
            mode="lines",
            line={"width": 1.6, "dash": "dash" if name == "model state" else "dot"},
            x=list(ends),
            y=[nbytes / unit.size] * 2,
            hoverinfo="text",
            hovertext=[f"<b>{name}, by formula</b><br>{format_bytes(nbytes)}"] * 2,
        )
    )


def _add_phases(figure: Plot, phases: StepPhases) -> None:
    """Stack the phases of each step below, on the same axis of steps."""
    unit = choose_unit([float(sum(took.max() for took in phases.mean_ns.values()))], DURATIONS)
    middle = (phases.first + phases.last) / 2
    for name in PHASES:
        if name not in phases.mean_ns:
            continue
        took, hue = phases.mean_ns[name], hue_of(name)
        figure.add_trace(
            bars(
                hue.label,
                name,
                middle,
                (took / unit.size).round(4),
                [
                    f"<b>{hue.label}</b><br>{format_duration(value)} of step {first}"
                    + ("" if first == last else f" to {last}, each")
                    for value, first, last in zip(
                        took.tolist(), phases.first.tolist(), phases.last.tolist(), strict=True
                    )
                ],
                lying=False,
                yaxis="y2",
                width=phases.last - phases.first + 1,
            )
        )
    figure.update_layout(
        barmode="stack",
        yaxis={"domain": _ABOVE},
        yaxis2=axis_below(f"phases ({unit.name})", _BELOW, num_ticks=4),
        xaxis={"anchor": "y2"},
    )


def _describe_growth(growth: MemoryGrowth | None) -> str:
    if growth is None:
        return ""
    label = events.memory_label(growth.sample)
    if abs(growth.bytes_per_step) < 1:
        return f" It stays the same from step to step ({label})."
    goes_on = ", and goes on growing" if growth.leaks else ""
    return f" It changes by {_signed(growth.bytes_per_step)} a step ({label}){goes_on}."


def _signed(value: float) -> str:
    sign = "+" if value >= 0 else "\u2212"
    return f"{sign}{format_bytes(abs(value))}"
