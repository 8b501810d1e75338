"""Pictures of figures: what is drawn is as long as it should be, and has the colour it should have."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import pytest
from PIL import Image, ImageColor

from dtprof.analysis.results import PARTS, Summary
from dtprof.interchange.exporters.figure_pictures import (
    SCALE,
    WIDTH,
    draw_picture,
    encode_png,
    mixed,
    plain,
    round_values,
)
from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.stacked_step_figure import draw_step_parts
from dtprof.report.figures.step_times_figure import draw_step_times


def pixels(figure: Any) -> npt.NDArray[np.uint8]:
    picture = draw_picture(figure)
    image = np.asarray(Image.open(io.BytesIO(picture.png)))
    assert image.shape == (picture.height, picture.width, 3)
    assert picture.width == WIDTH * SCALE
    return image


def count(row: npt.NDArray[np.uint8], colour: str) -> int:
    """Return the pixels of a colour, hatched or not."""
    exact = np.array(ImageColor.getrgb(colour))
    return int(((row == exact).all(axis=1) | (row == exact * 2 // 3).all(axis=1)).sum())


def test_bars_are_as_long_as_the_parts_of_the_step(summary: Summary) -> None:
    drawn = draw_step_parts(summary)
    assert not hasattr(drawn, "why")
    image = pixels(drawn.figure)
    compute = np.array(ImageColor.getrgb(hue_of("compute").light))
    bars = np.flatnonzero((image == compute).all(axis=2).sum(axis=1) > 100)
    rows = [bars[0], *bars[1:][np.diff(bars) > 1]]  # the first line of each bar
    assert len(rows) == len(summary.ranks) == 8
    for rank, at in zip(summary.ranks, rows, strict=True):
        assert rank.partition_ns is not None
        assert rank.step_ns is not None
        found = {part: count(image[at + 2], hue_of(part).light) for part in PARTS}
        for part, length in found.items():
            expected = rank.partition_ns[part] / rank.step_ns * sum(found.values())
            assert length == pytest.approx(expected, abs=3), (rank.rank, part)


def test_upright_bars_stand_where_their_numbers_are() -> None:
    figure = go.Figure(go.Bar(x=[0, 1, 2, 3], y=[10, 20, 0, 40], marker={"color": "#3465be"}, name="work"))
    figure.update_layout(title={"text": "A"}, height=400, bargap=0.2, xaxis={"title": {"text": "rank"}})
    image = pixels(figure)
    blue = (image == np.array(ImageColor.getrgb("#3465be"))).all(axis=2)
    blue[:110] = False  # the legend
    heights = blue.sum(axis=0)
    edges = np.flatnonzero(np.diff((heights > 0).astype(int)))
    middles = (edges[::2] + edges[1::2]) / 2
    assert [int(heights[round(at)]) for at in middles] == pytest.approx(
        [heights.max() * share for share in (0.25, 0.5, 1)], abs=2
    )
    assert middles[2] - middles[1] == pytest.approx(2 * (middles[1] - middles[0]), abs=3)  # that of 2 is not there


def test_lines_of_steps_are_drawn_on_their_band(summary: Summary) -> None:
    drawn = draw_step_times(summary)
    assert not hasattr(drawn, "why")
    image = pixels(drawn.figure)
    ink = (image == np.array(ImageColor.getrgb("#1c2430"))).all(axis=2)
    assert ink[150:-110].any(axis=0).sum() > 0.7 * WIDTH * SCALE  # from the first step to the last


def test_labels_lose_the_markup_of_plotly() -> None:
    assert plain("<b>rank 0</b>&nbsp;a &lt; b") == "rank 0 a < b"
    assert plain(None) == ""


def test_a_colour_that_shines_through_is_mixed_with_the_paper() -> None:
    assert mixed("rgba(0, 0, 0, 0.5)") == (128, 128, 128)
    assert mixed("#ff0000", 0.5) == (255, 128, 128)


def test_ticks_are_round_and_inside() -> None:
    assert round_values(0, 400) == [0, 50, 100, 150, 200, 250, 300, 350, 400]
    assert round_values(9.1, -0.6) == [0, 2, 4, 6, 8]
    assert round_values(1.5, 20.5) == [5, 10, 15, 20]


def test_pixels_come_back_from_the_png_as_they_were() -> None:
    drawn = np.random.default_rng(1).integers(0, 256, (7, 5, 3), np.uint8)  # rows that wrap around 255
    with Image.open(io.BytesIO(encode_png(drawn))) as found:
        found.load()
        assert (found.mode, found.size) == ("RGB", (5, 7))
        assert np.array_equal(np.asarray(found), drawn)


def test_hatching_goes_on_across_the_picture() -> None:
    # Lines of 2 pixels every 12, from the lower left to the upper right: wherever x + y is 0 or 1 modulo 12.
    bars = go.Figure(go.Bar(x=[10.0], y=["a"], orientation="h", marker={"color": "#ff0000", "pattern": {"shape": "/"}}))
    drawn = pixels(bars)
    dark, red = ((drawn == (value, 0, 0)).all(axis=2) for value in (170, 255))
    y, x = np.ogrid[: drawn.shape[0], : drawn.shape[1]]
    assert dark.sum() > 1_000
    assert np.array_equal(dark, (dark | red) & ((x + y) % 12 < 2))
