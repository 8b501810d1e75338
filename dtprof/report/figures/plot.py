"""A figure as the JSON that plotly.js draws.

Figures are plain dictionaries here: plotly's own objects validate each property, which takes as long as all the rest of
a redrawn page, and to import them takes longer than to write a short report. Whoever wants such an object, as
`run.figure` gives it, gets one from `Drawing.figure`, which validates everything.
"""

import base64
import math
from typing import Any

import numpy as np

_SHORT_TYPES = {"int8": "i1", "int16": "i2", "int32": "i4", "float64": "f8"}
"""plotly.js' names of array types that it reads without printing and parsing numbers."""


class Plot:
    """Traces and a layout, both as plotly.js documents them: https://plotly.com/javascript/reference/."""

    def __init__(self, layout: dict[str, Any]) -> None:
        """Make a figure without traces."""
        self.traces: list[dict[str, Any]] = []
        self.layout = layout

    def add_trace(self, trace: dict[str, Any]) -> None:
        """Draw a trace on top of the others."""
        self.traces.append(trace)

    def update_layout(self, **properties: Any) -> None:
        """Set properties; in a group of properties that is there already, those that are named."""
        _merge(self.layout, properties)

    def update_xaxes(self, **properties: Any) -> None:
        """Set properties of every horizontal axis."""
        self._update_axes("xaxis", properties)

    def update_yaxes(self, **properties: Any) -> None:
        """Set properties of every vertical axis."""
        self._update_axes("yaxis", properties)

    def add_shape(self, kind: str, **properties: Any) -> None:
        """Draw a line or rectangle as high as the plot."""
        whole_height = {"xref": "x", "y0": 0, "y1": 1, "yref": "y domain"}
        self.layout.setdefault("shapes", []).append({"type": kind, **whole_height, **properties})

    def add_annotation(self, **properties: Any) -> None:
        """Write text at a place."""
        self.layout.setdefault("annotations", []).append(properties)

    def as_json(self) -> dict[str, Any]:
        """Return the arguments of `Plotly.newPlot`."""
        return {"data": _as_json(self.traces), "layout": _as_json(self.layout)}

    def _update_axes(self, kind: str, properties: dict[str, Any]) -> None:
        for name in [name for name in self.layout if name.startswith(kind)]:
            _merge(self.layout[name], properties)


def new_trace(kind: str, **properties: Any) -> dict[str, Any]:
    """Return a trace; a property that is None is left to plotly.js."""
    return {"type": kind} | {name: value for name, value in properties.items() if value is not None}


def _merge(known: dict[str, Any], properties: dict[str, Any]) -> None:
    for name, value in properties.items():
        if isinstance(value, dict) and isinstance(known.get(name), dict):
            _merge(known[name], value)
        else:
            known[name] = value


def _as_json(value: Any) -> Any:
    """Return a value in types of JSON; NaN and infinities are null."""
    if isinstance(value, dict):
        return {name: _as_json(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(member) for member in value]
    if isinstance(value, np.ndarray):
        return _pack_array(value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pack_array(values: np.ndarray[Any, Any]) -> Any:
    """Return an array as plotly.js reads it fastest, integers in as few bytes as they take."""
    if values.size and values.dtype.kind == "i":
        lowest, highest = values.min(), values.max()
        for size in (np.int8, np.int16, np.int32):
            if np.iinfo(size).min <= lowest and highest <= np.iinfo(size).max:
                values = values.astype(size)
                break
    short = _SHORT_TYPES.get(values.dtype.name)
    if short is None or not values.size:
        return _as_json(values.tolist())
    packed = {"dtype": short, "bdata": base64.b64encode(values.tobytes()).decode("ascii")}
    return packed if values.ndim == 1 else packed | {"shape": ", ".join(map(str, values.shape))}
