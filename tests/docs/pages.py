"""The Markdown pages of the project: their text, headings, links, and the commands they show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """The path below the repository."""
        return str(self.path.relative_to(REPOSITORY))

    @property
    def prose(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    def headings(self) -> list[str]:
        """Return the headings below the title, as written."""
        return re.findall(r"^##+ (.+)$", self.prose, re.MULTILINE)

    def anchors(self) -> set[str]:
        """Return what a link to a heading of the page may name, as GitHub forms it."""
        titles = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return set(map(slug_of, titles))

    def links(self) -> list[str]:
        """Return the targets of links within the repository."""
        targets = [match["target"] for match in _LINK.finditer(self.prose)]
        return [target for target in targets if "://" not in target]

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of every command that a console block shows."""
        for block in _FENCE.finditer(self.text):
            if block["language"] == "console":
                yield from (shlex.split(line[2:]) for line in block["text"].splitlines() if line.startswith("$ "))


def slug_of(title: str) -> str:
    """Return what a link to a heading names, as GitHub forms it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def load(name: str) -> Page:
    """Return the page at a path below the repository."""
    path = REPOSITORY / name
    return Page(path=path, text=path.read_text(encoding="utf-8"))


def all_pages() -> list[Page]:
    """Return every page that is part of the project."""
    found = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "reference_trainer/README.md"]
    return [load(str(path.relative_to(REPOSITORY))) for path in sorted(found)]
