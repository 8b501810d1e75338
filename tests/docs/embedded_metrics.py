"""The metrics that docs/reference/prometheus.md lists, in a table behind a marker.

python -m tests.docs.embedded_metrics    brings the page up to date
"""

import re
from pathlib import Path

from dtprof.monitor.prometheus.metric_catalogue import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "prometheus.md"
_BLOCK = re.compile(r"<!-- metrics -->\n(?:\|.*\n)*")


def refresh(page: str) -> str:
    """Return the page with every metric as the code declares it today."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.help} |" for m in METRICS]
    table = "".join(f"{row}\n" for row in rows)
    return _BLOCK.sub(lambda _: f"<!-- metrics -->\n{table}", page)


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
