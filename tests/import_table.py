"""Who may import whom: the table that `test_imports.py` enforces and CONTRIBUTING.md shows.

python -m tests.import_table    brings the page up to date
"""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
_ROW = re.compile(r"^(?P<row>\| `(?:dtprof/)?(?P<folder>[\w*]+)(?:/|\.py)` \| [^|]* \| )[^|]*\|$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a folder may import beside itself and the standard library."""

    below: str | None = None
    """The floor it stands on: that folder, and those that it stands on in turn."""
    beside: frozenset[str] = frozenset()
    """Single folders."""
    packages: frozenset[str] | None = None
    """None: any."""

    def folders(self) -> frozenset[str]:
        """Return every folder of dtprof that it may import."""
        if self.below is None:
            return self.beside
        below = FLOORS[self.below]
        return self.beside | {self.below} | (below.folders() - below.beside)

    def describe(self) -> str:
        """Return it as the page shows it."""
        below = [] if self.below is None else [f"{self.below} and below" if FLOORS[self.below].below else self.below]
        packages = ["any package"] if self.packages is None else sorted(self.packages)
        parts = [", ".join([*below, *sorted(self.beside)]), ", ".join(packages)]
        return "; ".join(filter(None, parts)) or "the standard library"


def _floor(below: str | None = None, *, beside: str = "", packages: str | None = None) -> Floor:
    names = None if packages is None else frozenset(packages.split())
    return Floor(below=below, beside=frozenset(beside.split()), packages=names)


# `base` is dtprof/*.py, and `entry` the three files of it that start something: the command, the Python API, the
# recording of a lone process.
FLOORS = {
    "base": _floor(packages="numpy"),
    "records": _floor("base", packages="numpy fsspec"),
    "capture": _floor(beside="base records", packages="torch"),  # inside the ranks
    "job": _floor("records", packages="numpy"),
    "analysis": _floor("job", packages="numpy"),
    "diagnosis": _floor("analysis", beside="lint", packages="numpy msgspec"),
    "interchange": _floor("diagnosis", packages="numpy msgspec prometheus_client pyarrow PIL"),
    "report": _floor("diagnosis", beside="lint", packages="numpy plotly tomli"),  # tomllib of Python 3.10
    "monitor": _floor("report", beside="interchange", packages="numpy prometheus_client rich starlette"),
    # Of the packages, torch in the ranks, which a probe takes over.
    "launch": _floor("monitor", beside="capture lint", packages="fsspec numpy psutil pynvml starlette torch"),
    "session": _floor("launch", beside="interchange lint"),
    "api": _floor("session", beside="interchange"),
    "cli": _floor("session"),
    "entry": _floor("cli", beside="api capture"),
    "lint": _floor(packages=""),
    "reference_trainer": _floor(beside="entry", packages="numpy tokenizers torch typing_extensions"),
}


def refresh(page: str) -> str:
    """Return the page with what each folder of its table may import."""

    def filled(match: re.Match[str]) -> str:
        floor = FLOORS.get("base" if match["folder"] == "*" else match["folder"])
        return match[0] if floor is None else f"{match['row']}{floor.describe()} |"

    return _ROW.sub(filled, page)


def shown(page: str) -> list[str]:
    """Return the folders of the page's table."""
    return [match["folder"] for match in _ROW.finditer(page)]


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
