"""Lines of 80 columns that begin with their subject, and how text is wrapped."""

import re
import textwrap

WIDTH = 80
LABEL = 12


_GLUE = "\xa0"
_QUANTITY = re.compile(r"(?<=\d) (?=(?:[num]?s|min|h|[KMGT]i?B|B|[kMG]?B/s|%)(?!\w))")
"""The space between a number and its unit."""


def wrap_text(
    text: str, width: int = WIDTH, *, indent: str = "", max_lines: int | None = None, break_long_words: bool = True
) -> list[str]:
    """Return lines of at most `width`; numbers stay beside their units, and options whole.

    Parameters:
        indent: what begins all lines but the first.
        max_lines: at most so many; the last ends with dots then.
        break_long_words: for paths that are copied, no: such a line is longer.
    """
    lines = textwrap.wrap(
        _QUANTITY.sub(_GLUE, text),
        width,
        subsequent_indent=indent,
        break_long_words=break_long_words,
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" ...",
    )
    return [line.replace(_GLUE, " ") for line in lines]


def labelled(label: str, text: str, label_width: int = LABEL) -> list[str]:
    """Return the whole text behind its label, wrapped."""
    lines = wrap_text(text, WIDTH - label_width) or [""]
    return [f"{label if not i else '':<{label_width}}{line}".rstrip() for i, line in enumerate(lines)]
