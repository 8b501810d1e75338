"""Pages as data: find a dashboard by name or path and check it against the panels that exist."""

import functools
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from dtprof.analysis.metric_registry import tooltips_of
from dtprof.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PANEL_KEYS = {"panel", "title", "question", "help", "definitions"}
_PAGE_KEYS = {"title", "question", "order", "needs", "panels"}
NEEDS = ("finding", "comparison")
"""Optional subjects of a page; a report without the subject omits the page."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a page: which one, and the words around it."""

    name: str
    anchor: str
    title: str
    question: str = ""
    help: str = ""
    definitions: dict[str, str] = field(default_factory=dict)  # by metric, part, column


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """One page: its title, the question it answers, its panels from top to bottom."""

    name: str
    title: str
    question: str
    panels: tuple[Panel, ...]
    order: int = 100  # among the pages of a report, from left to right
    needs: str = ""  # one of NEEDS


def dashboards_folder() -> Path:
    """Return the folder of the shipped pages: inside the package when installed, beside it in a checkout."""
    package = Path(str(resources.files("dtprof")))
    inside = package / "dashboards"
    return inside if inside.is_dir() else package.parent / "dashboards"


def dashboard_names() -> list[str]:
    """Return the names of the shipped pages."""
    return sorted(path.stem for path in dashboards_folder().glob("*.toml"))


@functools.cache
def defined_names() -> dict[str, frozenset[str]]:
    """Return the names that definitions of each panel may have: its figures, and those that a shipped page defines."""
    names_of: dict[str, set[str]] = {}
    for name in dashboard_names():
        document = tomllib.loads((dashboards_folder() / f"{name}.toml").read_text(encoding="utf-8"))
        for table in document["panels"]:
            panel = table["panel"]
            names_of.setdefault(panel, set(tooltips_of(panel))).update(table.get("definitions", {}))
    return {panel: frozenset(names) for panel, names in names_of.items()}


def load_report(valid_panels: Collection[str], *, available: Collection[str] = ()) -> tuple[Dashboard, ...]:
    """Load the shipped pages of a report in their order, without those whose subject is not available."""
    pages = [load_dashboard(name, valid_panels) for name in dashboard_names()]
    chosen = [page for page in pages if not page.needs or page.needs in available]
    return name_apart(sorted(chosen, key=lambda page: (page.order, page.name)))


def name_apart(pages: Iterable[Dashboard]) -> tuple[Dashboard, ...]:
    """Give pages of one name a name of their own, and panels that several pages have an anchor, but for the first."""
    taken: set[str] = set()
    named: list[Dashboard] = []
    for given in pages:
        names = {page.name for page in named}
        page = replace(
            given,
            name=next(candidate for n in count(1) if (candidate := f"{given.name}{f'-{n}' * (n > 1)}") not in names),
        )
        panels = []
        for panel in page.panels:
            anchor = panel.anchor
            if anchor in taken:
                anchor = next(
                    candidate
                    for n in count(1)
                    if (candidate := f"{given.name}-{panel.anchor}{f'-{n}' * (n > 1)}") not in taken
                )
            taken.add(anchor)
            panels.append(replace(panel, anchor=anchor))
        named.append(replace(page, panels=tuple(panels)))
    return tuple(named)


def load_dashboard(name: str, valid_panels: Collection[str]) -> Dashboard:
    """Load a shipped page by its name, or a user's own by the path of its file.

    Raises:
        UsageError: there is no such page, or its file is not a page; the message names the line and what is valid.
    """
    is_path = name.endswith(".toml") or "/" in name
    path = Path(name) if is_path else dashboards_folder() / f"{name}.toml"
    if not is_path and name not in dashboard_names():
        raise UsageError(
            f"--dashboard {name!r} is not known; expected one of {', '.join(dashboard_names())}, "
            "or the path of a .toml file of your own"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--dashboard {name}: the file cannot be read ({error}); expected a .toml file, "
            f"or one of {', '.join(dashboard_names())}"
        ) from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    return _Checker(path, text, valid_panels).check(document)


class _Checker:
    """Parses a file into a page and names the line of an error."""

    def __init__(self, path: Path, text: str, valid_panels: Collection[str]) -> None:
        self.path = path
        self.lines = text.splitlines()
        self.valid_panels = valid_panels
        self.span = range(len(self.lines))  # where what is wrong must be

    def check(self, document: dict[str, Any]) -> Dashboard:
        self._refuse_unknown_keys(document, _PAGE_KEYS)
        tables = document.get("panels")
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            found = "it has no panels" if tables is None else f"panels is {tables!r}"
            expected = "expected at least one [[panels]] with panel = one of " + self._valid()
            raise self._error(found, expected, r"\s*panels\s*=|\s*\[\s*panels\s*\]")
        panels: list[Panel] = []
        for table in tables:
            self._enter(len(panels) + 1)
            panels.append(self._check_panel(table, {panel.anchor for panel in panels}))
        self._enter(0)
        return Dashboard(
            name=self.path.stem,
            title=self._text(document, "title", self.path.stem),
            question=self._text(document, "question", ""),
            panels=tuple(panels),
            order=self._order(document),
            needs=self._needs(document),
        )

    def _enter(self, number: int) -> None:
        """Locate later errors in the panel of that number; 0 is the part above all panels."""
        heads = [at for at, line in enumerate(self.lines) if re.match(r"\s*\[\[\s*panels\s*\]\]", line)]
        if len(heads) < number or not heads:
            self.span = range(len(self.lines))  # they are written in one line
        else:
            edges = [0, *heads, len(self.lines)]
            self.span = range(edges[number], edges[number + 1])

    def _order(self, document: dict[str, Any]) -> int:
        order = document.get("order", 100)
        if not isinstance(order, int) or isinstance(order, bool):
            raise self._error(f"order is {order!r}", "expected a whole number, for example 20", r"\s*order\s*=")
        return order

    def _needs(self, document: dict[str, Any]) -> str:
        needs = self._text(document, "needs", "")
        if needs and needs not in NEEDS:
            raise self._error(f"needs is {needs!r}", f"expected one of {', '.join(NEEDS)}", r"\s*needs\s*=")
        return needs

    def _check_panel(self, table: dict[str, Any], anchors: set[str]) -> Panel:
        name = table.get("panel")
        if name is None:
            raise self._error("a [[panels]] names no panel", f"expected panel = one of {self._valid()}", r"\s*\[\[")
        if not isinstance(name, str) or name not in self.valid_panels:
            raise self._error(f"unknown panel {name!r}", f"expected one of {self._valid()}", r".*\bpanel\s*=")
        self._refuse_unknown_keys(table, _PANEL_KEYS)
        definitions = table.get("definitions", {})
        if not isinstance(definitions, dict) or not all(isinstance(value, str) for value in definitions.values()):
            raise self._error(
                f"definitions of panel {name!r} are not texts",
                'expected a table of name = "definition"',
                r".*definitions",
            )
        self._refuse_unknown_definitions(name, definitions)
        figures = tooltips_of(name)  # which a page may define in words of its own
        plain = name.replace("_", "-")
        repeated = [f"{plain}-{number}" for number in range(2, len(anchors) + 3)]
        return Panel(
            name=name,
            anchor=next(anchor for anchor in [plain, *repeated] if anchor not in anchors),
            title=self._text(table, "title", name.replace("_", " ").capitalize()),
            question=self._text(table, "question", ""),
            help=self._text(table, "help", ""),
            definitions=definitions | {key: text for key, text in figures.items() if key not in definitions},
        )

    def _text(self, table: dict[str, Any], key: str, default: str) -> str:
        value = table.get(key, default)
        if not isinstance(value, str):
            raise self._error(f"{key} is {value!r}", "expected a text in quotes", rf"\s*{key}\s*=")
        if key == "title" and not value.strip():
            raise self._error("title is empty", "expected a text, or no title for the usual one", r"\s*title\s*=")
        return value.strip()

    def _refuse_unknown_definitions(self, panel: str, definitions: dict[str, str]) -> None:
        if not definitions or self.path.parent == dashboards_folder():  # the shipped pages say what there is
            return
        valid = defined_names().get(panel, frozenset())
        for name in definitions:
            if name not in valid:
                expected = f"expected {', '.join(sorted(valid))}" if valid else "this panel has none; say it in help"
                pattern = rf"(.*definitions[^#]*[\s{{.,]|\s*)[\"']?{re.escape(name)}[\"']?\s*="
                raise self._error(f"unknown name {name!r} in the definitions of {panel}", expected, pattern)

    def _refuse_unknown_keys(self, table: dict[str, Any], valid: set[str]) -> None:
        for key in table:
            if key not in valid:
                pattern = rf"[\s\[]*(panels\.)?{re.escape(key)}\b"
                raise self._error(f"unknown key {key!r}", f"expected {', '.join(sorted(valid))}", pattern)

    def _valid(self) -> str:
        return ", ".join(sorted(self.valid_panels))

    def _error(self, found: str, expected: str, pattern: str | None = None) -> UsageError:
        numbers = [at + 1 for at in self.span if pattern is not None and re.match(pattern, self.lines[at])]
        place = f"{self.path}, line {numbers[0]}" if numbers else str(self.path)
        return UsageError(f"{place}: {found}; {expected}")
