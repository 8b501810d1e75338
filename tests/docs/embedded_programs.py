"""Programs of the fault corpus, as the gallery shows them: `python -m tests.docs.embedded_programs` fills them in.

A marker `<!-- program: NAME -->` stands above a block with the source of that program, without its decorator.
"""

import inspect
import re
from pathlib import Path

from tests.faults import programs
from tests.faults.corpus import PROGRAMS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gallery.md"
_BLOCK = re.compile(r"<!-- program: (?P<name>\w+) -->\n(?:```python\n.*?```\n)?", re.DOTALL)


def refresh(page: str) -> str:
    """Return the page with the source of every program that it names."""
    programs.load()
    return _BLOCK.sub(lambda match: f"{match[0].partition(chr(10))[0]}\n```python\n{_source(match['name'])}```\n", page)


def shown(page: str) -> list[str]:
    """Return the names of the programs that the page shows."""
    return [match["name"] for match in _BLOCK.finditer(page)]


def _source(name: str) -> str:
    source = inspect.getsource(PROGRAMS[name].body)
    return source[source.index("def ") :].replace("  # type: ignore[no-untyped-def]", "")


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
