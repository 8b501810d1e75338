"""Lines of 80 columns that begin with what they are about."""

import textwrap

from dtprof.formatting import shorten

WIDTH = 80
LABEL = 12


def labelled(label: str, text: str, max_lines: int = 1) -> list[str]:
    """Return the text behind its label, wrapped; cut where it takes more lines than allowed."""
    lines = textwrap.wrap(text, WIDTH - LABEL, break_on_hyphens=False) or [""]
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], shorten(" ".join(lines[max_lines - 1 :]), WIDTH - LABEL)]
    return [f"{label if not i else '':<{LABEL}}{line}" for i, line in enumerate(lines)]
