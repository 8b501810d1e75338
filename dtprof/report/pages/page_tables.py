"""Tables of a page: sortable, numbers to the right, units in the header."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtprof.formatting import format_count, plural
from dtprof.report.figures.figure_numbers import Unit, choose_decimals, choose_unit, format_number
from dtprof.report.pages.page_markup import Markup, element, join

MAX_ROWS_IN_VIEW = 20
"""A longer table scrolls in a frame of its own."""
MOST_ROWS_SHOWN = 50
"""Of a longer table that can be sorted the first are shown, others on demand: browsers take long to lay out many."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The text of a cell, and the number it is sorted by; without a number it sorts as text."""

    text: str
    number: float | None = None


@dataclass(frozen=True, kw_only=True)
class PageColumn:
    """A column: the key of its definition, its header, and its cells from top to bottom."""

    key: str
    header: str
    cells: tuple[Cell, ...]
    is_number: bool = True


def text_column(key: str, header: str, texts: Sequence[str]) -> PageColumn:
    """Return a column of texts."""
    return PageColumn(key=key, header=header, cells=tuple(Cell(text=text) for text in texts), is_number=False)


def number_column(
    key: str, header: str, values: Sequence[float | None], formatted: Callable[[float], str] | None = None
) -> PageColumn:
    """Return a column of numbers with equal decimals, or as `formatted` writes them; None shows as a dash."""
    decimals = choose_decimals(values)
    write = formatted or (lambda value: format_number(value, decimals))
    return PageColumn(
        key=key,
        header=header,
        cells=tuple(
            Cell(text="\u2013", number=None) if value is None else Cell(text=write(value), number=value)
            for value in values
        ),
    )


def unit_column(key: str, header: str, values: Sequence[float | None], units: tuple[Unit, ...]) -> PageColumn:
    """Return a column of numbers in the one unit that fits its largest value, named in the header; none for dashes."""
    if all(value is None for value in values):
        return number_column(key, header, values)
    unit = choose_unit(values, units)
    return number_column(
        key, f"{header} ({unit.name})", [None if value is None else value / unit.size for value in values]
    )


def render_table(columns: Sequence[PageColumn], *, caption: str, definitions: Mapping[str, str]) -> Markup:
    """Return a table that can be sorted by each column."""
    head = [
        element(
            "th",
            element("button", column.header, type="button", title=definitions.get(column.key)),
            scope="col",
            class_="number" if column.is_number else None,
        )
        for column in columns
    ]
    body = [element("tr", *(_render_cell(column, row) for column in columns)) for row in range(len(columns[0].cells))]
    shown, rest = body[:MOST_ROWS_SHOWN], body[MOST_ROWS_SHOWN:]
    frame = element(
        "div",
        element(
            "table",
            element("caption", caption, class_="unseen"),
            element("thead", element("tr", *head)),
            element("tbody", *shown),
            element("tbody", *rest, hidden="") if rest else "",
            class_="sortable",
        ),
        class_=_frame(len(body)),
        tabindex="0",
        role="region",
        aria_label=caption,
    )
    return join(_render_tools(len(body), caption), frame) if rest else frame


def _render_tools(num_rows: int, caption: str) -> Markup:
    """Return the bar above a long table: a search field, a button for all rows, the number of rows shown."""
    return element(
        "div",
        element("input", type="search", placeholder="find rows", aria_label=f"Find rows: {caption}"),
        element("button", "all rows", type="button", aria_pressed="false"),
        element("span", f"{MOST_ROWS_SHOWN} of {format_count(num_rows)} rows", role="status"),
        class_="table-tools",
        data_first=str(MOST_ROWS_SHOWN),
    )


def _frame(num_rows: int) -> str:
    return "scroll tall" if num_rows > MAX_ROWS_IN_VIEW else "scroll"


def _render_cell(column: PageColumn, row: int) -> Markup:
    cell = column.cells[row]
    if not column.is_number:
        return element("td", element("bdi", cell.text))
    return element("td", cell.text, class_="number", data_value=None if cell.number is None else repr(cell.number))


def render_numbers(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Return the numbers of a figure as a table that opens on request."""
    return element(
        "details",
        element("summary", f"Numbers of this figure ({plural(len(rows), 'row')})"),
        render_plain_table(header, rows, caption=f"{title}: the numbers"),
        class_="numbers",
    )


def render_plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> Markup:
    """Return the numbers of a figure as a table: short markup, for it may have thousands of rows."""
    body = join(*(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element(
        "div",
        element(
            "table",
            element("caption", caption, class_="unseen"),
            element("thead", element("tr", *(element("th", name, scope="col") for name in header))),
            element("tbody", body),
        ),
        class_=_frame(len(rows)),
        tabindex="0",
        role="region",
        aria_label=caption,
    )
