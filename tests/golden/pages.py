"""What an HTML page of `dtprof report` says: its text, and a digest of the data of each figure."""

import base64
import gzip
import hashlib
import json
import re
from array import array
from html.parser import HTMLParser
from typing import Any

FIGURES = re.compile(r'id="figures">(.*?)</script>', re.DOTALL)
BLOCKS = ("p", "li", "tr", "div", "section", "h1", "h2", "h3", "dt", "dd", "figure", "figcaption", "summary", "br")
CODES = {"f8": "d", "f4": "f", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I"}


def text_of_page(page: str) -> str:
    """Return the visible text of a page, a line for each block, then one line for each figure."""
    reader = _Reader()
    reader.feed(page)
    lines = (" ".join(line.split()) for line in "".join(reader.pieces).splitlines())
    figures: dict[str, Any] = {}
    if found := FIGURES.search(page):
        figures = json.loads(gzip.decompress(base64.b64decode(found[1])))
    digests = (f"figure {name}: sha256 {_digest(figure)}" for name, figure in sorted(figures.items()))
    return "\n".join([*filter(None, lines), *digests]) + "\n"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._is_hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_hidden = self._is_hidden or tag in ("script", "style")
        if tag in BLOCKS:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append(" | ")
        self.pieces += [f"({text}) " for name, text in attrs if name == "title" and text]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._is_hidden = False
        if tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._is_hidden:
            self.pieces.append(data.replace("\n", " "))


def _digest(figure: object) -> str:
    return hashlib.sha256(json.dumps(_rounded(figure), sort_keys=True).encode()).hexdigest()


def _rounded(value: Any) -> Any:
    """Return a document with plain lists of numbers of nine digits: the last ones depend on the processor."""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("bdata"), str) and value.get("dtype") in CODES:
        numbers = array(CODES[value["dtype"]], base64.b64decode(value["bdata"]))
        return [value.get("shape"), _rounded(numbers.tolist())]
    return {name: _rounded(one) for name, one in value.items()}
