"""The schemas of the tables that docs/reference/python-api.md shows, each behind a marker.

python -m tests.docs.embedded_tables    brings the page up to date
"""

import re
from pathlib import Path

from dtprof import api

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python-api.md"
_BLOCK = re.compile(r"<!-- table: (?P<name>\w+) -->\n(?:\|.*\n)*")


def refresh(page: str) -> str:
    """Return the page with every schema as the code declares it today."""
    return _BLOCK.sub(lambda match: f"<!-- table: {match['name']} -->\n{_schema(match['name'])}", page)


def shown(page: str) -> list[str]:
    """Return the names of the tables whose schema the page shows."""
    return [match["name"] for match in _BLOCK.finditer(page)]


def _schema(name: str) -> str:
    rows = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    rows += [f"| `{c.name}` | {c.dtype} | {c.unit} | {c.meaning} |" for c in api.schema(name)]
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
