"""Figures of the report as PNG, for programs that show neither pages nor scripts.

Draws what Plotly figures of bars, lines and bands hold, with Pillow, which tensorboard brings along: a
browser, which Plotly's own export needs, is not there where jobs run. Hover texts and zooming are the report's.
"""

import html
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageColor, ImageDraw, ImageFont

from dtprof.interchange.exporters.tensorboard_events import Picture
from dtprof.intervals import Floats

WIDTH = 960
MIN_HEIGHT, MAX_HEIGHT = 160, 1600
SCALE = 2  # pixels a unit
SMALL, LARGE = 12, 15  # sizes of text
LINE = 18  # from one line of text to the next
EDGE, BOTTOM = 14, 46
INK, PALE, PAPER = "#1c2430", "#dfe3e8", "#ffffff"
NUM_TICKS = 8
HATCH_EVERY = 6
MIN_GAPPED = 4
"""Pixels that a bar takes with its gap; narrower ones without, or rounding makes stripes."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ROW_ABOVE = 2
"""The filter of PNG that keeps how each row differs from the one above: mostly zeros here."""
FASTEST = 1
Colour = tuple[int, int, int]


class PlotlyFigure(Protocol):
    """A Plotly figure."""

    @property
    def data(self) -> Any:
        """Its traces."""

    @property
    def layout(self) -> Any:
        """Title, axes and how bars are put together."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """How values lie along one side of a picture."""

    first: float  # value at `begin`
    last: float  # value at `end`
    begin: float
    end: float

    @overload
    def at(self, value: float) -> float: ...

    @overload
    def at(self, value: Floats) -> Floats: ...

    def at(self, value: float | Floats) -> float | Floats:
        """Return where a value lies, or each of several."""
        return self.begin + (value - self.first) / (self.last - self.first) * (self.end - self.begin)


def draw_picture(figure: PlotlyFigure) -> Picture:
    """Draw a figure of bars, or of lines."""
    return _Canvas(figure).draw()


class _Canvas:
    def __init__(self, figure: PlotlyFigure) -> None:
        self._layout, self._traces = figure.layout, list(figure.data)
        self._bars = [trace for trace in self._traces if trace.type == "bar"]
        self._lines = [trace for trace in self._traces if trace.type == "scatter"]
        self._upright = bool(self._bars) and self._bars[0].orientation != "h"
        self._height = min(MAX_HEIGHT, max(MIN_HEIGHT, int(self._layout.height or 0)))
        self._image = Image.new("RGB", (WIDTH * SCALE, self._height * SCALE), PAPER)
        self._pen = ImageDraw.Draw(self._image)
        self._small, self._large = (ImageFont.load_default(size * SCALE) for size in (SMALL, LARGE))
        self._hatch: dict[str, Image.Image] = {}

    def draw(self) -> Picture:
        self._write(EDGE, 6, plain(self._layout.title.text), self._large)
        top = self._draw_legend(6 + LINE + 6) + 8
        rows = self._rows()
        left = EDGE + 8 + max((self._length(text) for _, text in rows), default=0)
        right, bottom = WIDTH - EDGE - 8, self._height - BOTTOM
        of_places, of_lengths = self._reach()
        if self._bars and not self._upright:
            of_places, of_lengths = of_lengths, of_places
        across = Axis(**self._range(self._layout.xaxis, of_places), begin=left, end=right)
        down = Axis(**self._range(self._layout.yaxis, of_lengths), begin=bottom, end=top)
        self._draw_shapes(across, top, bottom)
        self._draw_ticks(across, down, rows)
        self._draw_bars(across, down)
        self._draw_lines(across, down)
        self._draw_notes(across, top)
        self._write((left + right) / 2, self._height - 20, plain(self._layout.xaxis.title.text), self._small, "ma")
        return Picture(png=encode_png(np.asarray(self._image)), width=self._image.width, height=self._image.height)

    def _rows(self) -> list[tuple[float, str]]:
        """Return the labels at the left: position and text."""
        axis = self._layout.yaxis
        if axis.tickvals is not None and axis.ticktext is not None:
            return [(float(at), plain(text)) for at, text in zip(axis.tickvals, axis.ticktext, strict=True)]
        if self._bars and not self._upright:
            return [(float(place), plain(name)) for name, place in self._categories().items()]
        first, last = self._range(axis, self._reach()[1]).values()
        return [(value, f"{value:g}") for value in round_values(first, last)]

    def _categories(self) -> dict[str, int]:
        names = dict.fromkeys(str(name) for trace in self._bars for name in self._sides(trace)[0])
        return {name: place for place, name in enumerate(names)}

    def _range(self, axis: Any, reach: tuple[float, float]) -> dict[str, float]:
        first, last = (float(value) for value in axis.range) if axis.range else reach
        if not axis.range and axis.autorange == "reversed":
            first, last = last, first
        return {"first": first, "last": last if last != first else first + 1}

    def _reach(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return from where to where places reach, and lengths."""
        places, lengths = [0.0], [0.0]
        for _, at, _, ends in self._stacks():
            places += [float(at.min()) - 0.5, float(at.max()) + 0.5] if len(at) else []
            lengths += ends.tolist()
        for trace in self._lines:
            x, y = (np.asarray(values, np.float64) for values in (trace.x, trace.y))
            places += x[np.isfinite(x)].tolist()
            lengths += y[np.isfinite(y)].tolist()
        first = min(places[1:], default=0.0)
        return (first, max(places[1:], default=1.0)), (0.0, 1.03 * max(lengths) or 1.0)

    def _sides(self, trace: Any) -> tuple[Any, Any]:
        """Return positions and lengths of bars."""
        return (trace.x, trace.y) if self._upright else (trace.y, trace.x)

    def _stacks(self) -> Iterator[tuple[Any, Floats, Floats, Floats]]:
        """Yield each trace of bars with its rows, and where its bars begin and end."""
        categories = self._categories()
        reached: dict[float, float] = {}
        for trace in self._bars:
            at, length = self._sides(trace)
            if isinstance(at[0] if len(at) else "", str):
                places = np.array([categories[name] for name in at], np.float64)
            else:
                places = np.asarray(at, np.float64)
            lengths = np.nan_to_num(np.asarray(length, np.float64))
            begins: Floats = np.zeros(len(lengths)) + (
                0.0 if trace.base is None else np.asarray(trace.base, np.float64)
            )
            if self._layout.barmode in ("stack", "relative") and trace.base is None:
                begins = np.array([reached.get(place, 0.0) for place in places.tolist()])
                reached |= dict(zip(places.tolist(), (begins + lengths).tolist(), strict=True))
            yield trace, places, begins, begins + lengths

    def _draw_bars(self, across: Axis, down: Axis) -> None:
        gap = 1.0 - float(self._layout.bargap or 0)
        side, ahead = (across, down) if self._upright else (down, across)
        unit = abs(side.at(1) - side.at(0))
        if unit * SCALE < MIN_GAPPED:
            gap = 1.0
        low, high = sorted((ahead.begin, ahead.end))
        for trace, places, begins, ends in self._stacks():
            half = unit * (float(trace.width) if isinstance(trace.width, int | float) else gap) / 2
            colour, pattern = mixed(trace.marker.color), trace.marker.pattern.shape
            for place, begin, end in zip(places.tolist(), begins.tolist(), ends.tolist(), strict=True):
                along = sorted(round(min(max(ahead.at(value), low), high) * SCALE) for value in (begin, end))
                aside = sorted(round((side.at(place) + off) * SCALE) for off in (-half, half))
                if along[1] > along[0]:
                    (x0, x1), (y0, y1) = (aside, along) if self._upright else (along, aside)
                    self._fill((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)), colour, pattern)

    def _fill(self, box: tuple[int, int, int, int], colour: Colour, pattern: str | None) -> None:
        self._pen.rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=colour)
        if pattern:
            darker = Image.new("RGB", (box[2] - box[0], box[3] - box[1]), tuple(value * 2 // 3 for value in colour))
            self._image.paste(darker, box[:2], self._hatching(pattern).crop(box))

    def _hatching(self, pattern: str) -> Image.Image:
        if pattern not in self._hatch:
            every, width = HATCH_EVERY * SCALE, SCALE
            y, x = np.ogrid[:every, :every]
            marks = (x + y) % every < width
            if pattern == "x":
                marks |= (x - y) % every < width
            elif pattern == ".":
                marks = (x % every < width) & (y % every < width)
            across, down = -(-self._image.width // every), -(-self._image.height // every)
            self._hatch[pattern] = Image.fromarray(np.tile(marks.astype(np.uint8) * 255, (down, across)))
        return self._hatch[pattern]

    def _draw_lines(self, across: Axis, down: Axis) -> None:
        before: list[tuple[float, float]] = []
        for trace in self._lines:
            x, y = (np.asarray(values, np.float64) for values in (trace.x, trace.y))
            known = np.isfinite(x) & np.isfinite(y)
            right = across.at(x[known]) * SCALE
            below = np.minimum(np.maximum(down.at(y[known]), down.end), down.begin) * SCALE
            points = list(zip(right.tolist(), below.tolist(), strict=True))
            if trace.fill == "tonexty" and len(points) + len(before) > 2:
                self._pen.polygon(points + before[::-1], fill=mixed(trace.fillcolor))
            width = trace.line.width if trace.line.width is not None else 2
            if width and len(points) > 1:
                self._pen.line(points, fill=mixed(trace.line.color, trace.opacity), width=max(1, round(width * SCALE)))
            if trace.mode and "markers" in trace.mode:
                for left, top in points:
                    self._pen.ellipse((left - 4, top - 4, left + 4, top + 4), fill=mixed(trace.marker.color))
            before = points

    def _draw_shapes(self, across: Axis, top: float, bottom: float) -> None:
        for shape in self._layout.shapes:
            left, right = across.at(float(shape.x0)), across.at(float(shape.x1))
            box = (left * SCALE, top * SCALE, right * SCALE, bottom * SCALE)
            if shape.type == "line":
                self._pen.line(box, fill=mixed(shape.line.color), width=SCALE)
            else:
                self._pen.rectangle(box, fill=mixed(shape.fillcolor))

    def _draw_notes(self, across: Axis, top: float) -> None:
        for note in self._layout.annotations:
            if note.textangle:
                continue  # stands on its side in a place too narrow for it
            at = min(max(across.at(float(note.x)), across.begin), across.end)
            anchor = "ra" if at > (across.begin + across.end) / 2 else "la"
            self._write(at, top - LINE + 2, plain(note.text), self._small, anchor)

    def _draw_ticks(self, across: Axis, down: Axis, rows: Sequence[tuple[float, str]]) -> None:
        for value in round_values(across.first, across.last):
            at = across.at(value)
            self._line(at, down.end, at, down.begin)
            self._write(at, down.begin + 4, f"{value:g}", self._small, "ma")
        free_from = -np.inf
        for at, text in sorted((down.at(value), text) for value, text in rows):
            if at - LINE / 2 < free_from:
                continue  # no room for the names of all
            free_from = at + LINE / 2 - 4
            if self._upright or not self._bars:
                self._line(across.begin, at, across.end, at)
            self._write(across.begin - 6, at, text, self._small, "rm")
        title = plain(self._layout.yaxis.title.text)
        if title:
            self._write(EDGE, down.end - LINE, title, self._small)

    def _draw_legend(self, top: float) -> float:
        """Draw the legend; return the position below it."""
        at = float(EDGE)
        named = [trace for trace in self._traces if trace.name and trace.showlegend is not False]
        for trace in named:
            name = plain(trace.name)
            length = 18 + self._length(name) + 14
            if at + length > WIDTH - EDGE:
                at, top = EDGE, top + LINE
            if trace.type == "bar":
                box = [round(value * SCALE) for value in (at, top + 2, at + 12, top + 14)]
                self._fill((box[0], box[1], box[2], box[3]), mixed(trace.marker.color), trace.marker.pattern.shape)
            else:
                colour = mixed(trace.fillcolor) if trace.fill else mixed(trace.line.color, trace.opacity)
                self._line(at, top + 8, at + 12, top + 8, colour, 6 if trace.fill else 2)
            self._write(at + 18, top + 8, name, self._small, "lm")
            at += length
        notes = any(not note.textangle for note in self._layout.annotations)
        return top + LINE + (LINE if notes or plain(self._layout.yaxis.title.text) else 0)

    def _line(self, x0: float, y0: float, x1: float, y1: float, colour: Colour | str = PALE, width: int = 1) -> None:
        self._pen.line((x0 * SCALE, y0 * SCALE, x1 * SCALE, y1 * SCALE), fill=colour, width=width * SCALE // 2 or 1)

    def _write(self, x: float, y: float, text: str, font: Any, anchor: str = "la") -> None:
        self._pen.text((x * SCALE, y * SCALE), text, fill=INK, font=font, anchor=anchor)

    def _length(self, text: str) -> float:
        return self._pen.textlength(text, font=self._small) / SCALE


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return rows of pixels of three colours as PNG; Pillow tries five filters a row, and takes three times as long."""
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, -1)
    filtered = np.empty((height, 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = ROW_ABOVE
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.data, FASTEST)), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def plain(text: str | None) -> str:
    """Return a label of Plotly without its tags and entities, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text or "")).split())


def mixed(colour: str | None, opacity: float | None = None) -> Colour:
    """Return a colour as it looks on paper, blended with the background by its opacity."""
    parts = re.fullmatch(r"rgba\((\d+), ?(\d+), ?(\d+), ?([\d.]+)\)", colour or INK)
    values = [int(part) for part in parts.groups()[:3]] if parts else ImageColor.getrgb(colour or INK)[:3]
    share = float(parts[4]) if parts else 1.0 if opacity is None else float(opacity)
    red, green, blue = (round(255 + (value - 255) * share) for value in values)
    return red, green, blue


def round_values(first: float, last: float) -> list[float]:
    """Return round values between two, a few of them."""
    low, high = min(first, last), max(first, last)
    raw = (high - low) / NUM_TICKS
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [round(number * step, 10) for number in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]
