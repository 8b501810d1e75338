"""The figures that docs/reference/metrics.md lists, in tables behind markers.

python -m tests.docs.embedded_figures    brings the page up to date
"""

import re
from pathlib import Path

from dtprof.analysis.metric_registry import KINDS
from tests.docs.pages import slug_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
_BLOCK = re.compile(r"<!-- figures: (?P<kind>\w+) -->\n(?:\|.*\n)*")


def refresh(page: str) -> str:
    """Return the page with every figure as the registry declares it today."""
    return _BLOCK.sub(lambda match: f"<!-- figures: {match['kind']} -->\n{_table(match['kind'])}", page)


def shown(page: str) -> list[str]:
    """Return the kinds of figures that the page lists."""
    return [match["kind"] for match in _BLOCK.finditer(page)]


def _table(kind: str) -> str:
    rows = ["| figure | unit | clock | better | is | null where |", "|---|---|---|---|---|---|"]
    rows += [
        f"| `{m.name}` | {m.unit} | {m.clock} | {m.better} "
        f"| {m.definition} [{m.section}](#{slug_of(m.section)}) | {m.null} |"
        for m in KINDS[kind]
    ]
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
