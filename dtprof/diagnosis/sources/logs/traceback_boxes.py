"""Turn tracebacks that rich draws into a frame (Lightning, Typer, Accelerate) into the form that Python prints."""

import re

FRAME = re.compile(r"(?:❱ )?(/[^│]{1,1000}?|[\w./-]{1,1000}?\.py|<\w{1,80}>):(\d{1,9})(?: in (\S.{0,200}?))?$")
MARKED = re.compile(r"❱\s*\d{1,9}[\s│]*(.*)")
START = "Traceback (most recent call last)"
EDGES = ("╭", "│", "╰")


def is_boxed(text: str) -> bool:
    """Say whether a line is part of a frame."""
    return text.lstrip(" ").startswith(EDGES)


def unboxed(text: str) -> str | None:
    """Return the line as Python's own traceback has it; None for one that this would not have."""
    text = text.strip()
    if text.startswith("╭"):
        return f"{START}:" if START in text else None
    if text.startswith("╰"):
        return None
    inner = text.strip("│").strip()
    if found := FRAME.match(inner):
        name = f", in {found[3]}" if found[3] else ""
        return f'  File "{found[1]}", line {found[2]}{name}'
    if found := MARKED.match(inner):
        return f"    {found[1].strip()}"
    return None
