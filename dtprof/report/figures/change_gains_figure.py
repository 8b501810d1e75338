"""What each single change would gain, with its interval."""

from dtprof.analysis.whatif.prediction import NO_GAIN, Prediction
from dtprof.analysis.whatif.whatif_changes import describe
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, new_figure
from dtprof.report.figures.figure_numbers import format_duration
from dtprof.report.figures.figure_source import Source

MAX_CHANGES = 14
HUE = "forward"


def find_prediction(source: Source) -> Prediction | Nothing:
    """Return what was predicted; why there is nothing where no change was."""
    found = source.closeup.prediction if source.closeup is not None else None
    if found is not None and found.scenarios:
        return found
    reasons = found.cannot_tell if found is not None else ()
    why = reasons[-1].removeprefix("whatif: ") if reasons else "the run was not replayed"
    return Nothing(
        why=f"No change is predicted: {why[:1].lower() + why[1:].rstrip('.')}.",
        remedy="Predictions take four measured steps or more of all ranks on one clock; dtprof whatif replays longer "
        "steps than a report does.",
    )


def draw_change_gains(source: Source) -> Drawing | Nothing:
    """Draw one bar a change: the share of the step that goes."""
    found = find_prediction(source)
    if isinstance(found, Nothing):
        return found
    shown = found.telling[:MAX_CHANGES]
    names = [describe(scenario.fix) for scenario in shown]
    gains = [100 * (scenario.gain or 0.0) for scenario in shown]
    bounds = [scenario.interval or (scenario.gain or 0.0,) * 2 for scenario in shown]
    figure = new_figure(
        title="Gain of single changes", x_title="shorter steps (%)", y_title="", height=112 + 30 * len(shown)
    )
    trace = bars(
        "predicted gain",
        HUE,
        [as_label(name) for name in names],
        gains,
        [
            f"<b>{as_label(name)}</b><br>steps of {format_duration(scenario.step_ns or 0)}<br>"
            f"{gain:.1f} % shorter, {100 * low:.1f} to {100 * high:.1f} %"
            for name, scenario, gain, (low, high) in zip(names, shown, gains, bounds, strict=True)
        ],
    )
    trace["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, 100 * high - gain) for gain, (_, high) in zip(gains, bounds, strict=True)],
        "arrayminus": [max(0.0, gain - 100 * low) for gain, (low, _) in zip(gains, bounds, strict=True)],
        "color": "#888888",
        "thickness": 1.5,
    }
    figure.add_trace(trace)
    figure.update_layout(bargap=0.3, showlegend=False)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    best = found.best
    used = f"steps {found.steps[0]} to {found.steps[1]}" if found.steps else "some steps"
    said = (
        f"{NO_GAIN[:1].upper()}{NO_GAIN[1:]}"
        if best is None
        else f"{describe(best.fix)[:1].upper()}{describe(best.fix)[1:]} would make steps "
        f"{100 * (best.gain or 0.0):.1f} % shorter"
    )
    return Drawing(
        plot=figure,
        sentence=f"{said}. Replayed are {used}: the replay misses their measured time by "
        f"{100 * (found.replay_error or 0.0):.2f} %.",
        columns=("change", "as an option", "step (ms)", "gain (%)", "from (%)", "to (%)", "assumes"),
        rows=tuple(
            (
                name,
                _option(scenario.fix),
                f"{(scenario.step_ns or 0) / 1e6:.3f}",
                f"{gain:.2f}",
                f"{100 * low:.2f}",
                f"{100 * high:.2f}",
                scenario.assumes,
            )
            for name, scenario, gain, (low, high) in zip(names, shown, gains, bounds, strict=True)
        ),
    )


def _option(fix: tuple[str, ...]) -> str:
    named = ("rank", "host", "stage", "op", "phase")
    parts = (name.split("=", 1) for name in fix)
    return " ".join(f"--fix {what}={value}" if what in named else f"--{what} {value}" for what, value in parts)
