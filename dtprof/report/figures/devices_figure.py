"""Processors, memories and GPUs of the nodes over the run, as the launchers sampled them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtprof.analysis.memory.device_series import DeviceSeries, NodeSeries, extremes_of, mean_busy, spread_of
from dtprof.formatting import plural
from dtprof.intervals import Floats
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, axis_below, new_figure
from dtprof.report.figures.figure_numbers import SIZES, choose_unit, format_bytes, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.plot import Plot, new_trace

MAX_LINES = 6
"""Devices that have a line of their own; of more the least, the median and the most are drawn."""
ROW_HEIGHT = 136
GAP = 0.06
QUANTITIES = {
    "busy": "busy (%)",
    "memory": "memory",
    "traffic": "network",
    "power": "power (W)",
    "clock": "clock (MHz)",
    "temperature": "temperature (\u00b0C)",
}
_UNITS = {"power": "W", "clock": "MHz", "temperature": "\u00b0C"}
HOW_TO_GET = (
    "The launcher samples its node once a second: start the job with `dtprof run` on every node; GPUs need NVIDIA's "
    "driver."
)


@dataclass(frozen=True, kw_only=True)
class _Line:
    name: str
    meta: str
    t_s: Floats
    values: dict[str, Floats]


def draw_devices(source: Source) -> Drawing | Nothing:
    """Draw one row a quantity, one line a device."""
    nodes = source.nodes or NodeSeries()
    shown = [device for device in nodes.devices if device.values]
    if not shown:
        return Nothing(why="The nodes were not sampled.", remedy=HOW_TO_GET)
    lines = _own_lines(shown) if len(shown) <= MAX_LINES else _shared_lines(shown)
    quantities = [name for name in QUANTITIES if any(name in line.values for line in lines)]
    figure = new_figure(
        title="Processors, memories and GPUs", x_title="time since the launcher started (s)", y_title="",
        height=72 + ROW_HEIGHT * len(quantities),
    )  # fmt: skip
    layout: dict[str, Any] = {}
    share = (1 + GAP) / len(quantities)
    for row, quantity in enumerate(quantities):
        scale, title = _scale(quantity, lines)
        top = 1 - row * share
        axis = axis_below(title, (max(0.0, top - share + GAP), top), num_ticks=5)
        layout["yaxis" if not row else f"yaxis{row + 1}"] = axis | ({"range": [0, 101]} if quantity == "busy" else {})
        for line in lines:
            if quantity in line.values:
                first = next(name for name in quantities if name in line.values)
                _add(figure, line, quantity, scale, row, listed=quantity == first)
    figure.update_layout(**layout, xaxis={"anchor": "y" if len(quantities) == 1 else f"y{len(quantities)}"})
    figure.update_xaxes(showgrid=False)
    return Drawing(
        plot=figure,
        sentence=_describe(shown, nodes),
        columns=("host", "device", "what", "least", "mean", "most"),
        rows=tuple(
            (
                device.host,
                device.device,
                QUANTITIES[name].split(" (")[0],
                *(_word(name, x) for x in extremes_of(column)),
            )
            for device in shown
            for name, column in device.values.items()
        ),
        zooms=True,
    )


def _own_lines(devices: Sequence[DeviceSeries]) -> list[_Line]:
    several = len({device.host for device in devices}) > 1
    return [
        _Line(
            name=f"{device.host} {device.device}" if several else device.device,
            meta=f"series {position % 6}",
            t_s=device.t_ns / 1e9,
            values=dict(device.values),
        )
        for position, device in enumerate(devices)
    ]


def _shared_lines(devices: Sequence[DeviceSeries]) -> list[_Line]:
    """Return the least, the median and the most of all hosts, and of all GPUs."""
    lines = []
    for kind, position in (("hosts", 0), ("GPUs", 3)):
        some = [device for device in devices if (device.device == "host") == (kind == "hosts")]
        for offset, (word, (t_ns, values)) in enumerate(spread_of(some).items()):
            name = f"{word} of {len(some)} {kind}"
            lines.append(_Line(name=name, meta=f"series {position + offset}", t_s=t_ns / 1e9, values=values))
    return lines


def _scale(quantity: str, lines: Sequence[_Line]) -> tuple[float, str]:
    """Return the divisor of values, and the title of their axis."""
    if quantity not in ("memory", "traffic"):
        return (0.01 if quantity == "busy" else 1.0), QUANTITIES[quantity]
    largest = [float(np.nanmax(line.values[quantity])) for line in lines if quantity in line.values]
    unit = choose_unit(largest, SIZES)
    return unit.size, f"{QUANTITIES[quantity]} ({unit.name}{'/s' if quantity == 'traffic' else ''})"


def _add(figure: Plot, line: _Line, quantity: str, scale: float, row: int, *, listed: bool) -> None:
    values = line.values[quantity]
    figure.add_trace(
        new_trace(
            "scatter",
            name=as_label(line.name),
            legendgroup=line.name,
            showlegend=listed,
            meta=line.meta,
            yaxis="y" if not row else f"y{row + 1}",
            mode="lines",
            line={"width": 1.6, "color": hue_of(line.meta).light},
            x=line.t_s.round(3),
            y=[None if np.isnan(value) else float(f"{value / scale:.4g}") for value in values.tolist()],
            hoverinfo="text",
            hovertext=[
                f"<b>{as_label(line.name)}</b><br>{QUANTITIES[quantity].split(' (')[0]}: {_word(quantity, value)}, "
                f"{at:.0f} s after the start"
                for at, value in zip(line.t_s.tolist(), values.tolist(), strict=True)
            ],
        )
    )


def _word(quantity: str, value: float) -> str:
    if np.isnan(value):
        return "not known"
    if quantity == "busy":
        return format_share(value)
    if quantity in ("memory", "traffic"):
        return format_bytes(value) + ("/s" if quantity == "traffic" else "")
    return f"{value:.0f} {_UNITS[quantity]}"


def _describe(shown: Sequence[DeviceSeries], nodes: NodeSeries) -> str:
    hosts = [device for device in shown if device.device == "host"]
    gpus = [device for device in shown if device.device != "host"]
    said = []
    for word, some in (("processors", hosts), ("GPUs", gpus)):
        mean = mean_busy(some)
        if mean is not None:
            said.append(f"{word} are busy for {format_share(mean)} of the time")
    sentence = f"{plural(len(hosts), 'host')}, {plural(len(gpus), 'GPU')}"
    sentence += f": on average {' and '.join(said)}." if said else "."
    if nodes.no_gpus:
        reason = next(iter(nodes.no_gpus.values())).rstrip(".")
        where = "" if len(nodes.no_gpus) == len(hosts) else f" on {plural(len(nodes.no_gpus), 'host')}"
        sentence += f" There are no samples of GPUs{where} ({reason}): they take NVIDIA's driver and a visible GPU."
    return sentence
