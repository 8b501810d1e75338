"""Plots say to plotly.js what plotly's own objects would."""

import json

import numpy as np
import pytest

from dtprof.report.figures.figure_registry import FIGURES
from dtprof.report.figures.plot import Plot, new_trace
from tests.report.example_closeups import source_of
from tests.report.test_figures_of_pages import draw


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"blame"}))
def test_a_plot_is_what_plotly_writes_of_the_same_figure_after_validation(name: str) -> None:
    drawn = draw(name, source_of())
    assert drawn.plot.as_json() == json.loads(drawn.figure.to_json())


def test_what_is_not_a_number_is_null_and_integers_take_as_few_bytes_as_hold_them() -> None:
    plot = Plot({"xaxis": {"title": {"text": "step"}}, "xaxis2": {}})
    plot.add_trace(new_trace("scatter", x=np.array([1, 200]), y=[float("nan"), np.float64(2.5)], text=None))
    plot.update_xaxes(title={"standoff": 8}, nticks=5)
    written = plot.as_json()
    # 200 takes two bytes of a signed integer: 01 00 c8 00 in base64 is AQDIAA==.
    assert written["data"] == [{"type": "scatter", "x": {"dtype": "i2", "bdata": "AQDIAA=="}, "y": [None, 2.5]}]
    assert written["layout"]["xaxis"] == {"title": {"text": "step", "standoff": 8}, "nticks": 5}
    assert written["layout"]["xaxis2"] == {"title": {"standoff": 8}, "nticks": 5}
