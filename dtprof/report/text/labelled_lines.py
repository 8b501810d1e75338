"""Lines of 80 columns that begin with their subject."""

import textwrap

WIDTH = 80
LABEL = 12


def labelled(label: str, text: str, label_width: int = LABEL) -> list[str]:
    """Return the whole text behind its label, wrapped."""
    lines = textwrap.wrap(text, WIDTH - label_width, break_on_hyphens=False) or [""]
    return [f"{label if not i else '':<{label_width}}{line}".rstrip() for i, line in enumerate(lines)]
