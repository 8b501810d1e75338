"""The packages that `pip install dtprof` brings, with their licences: `python -m tests.docs.embedded_licences`.

Follows the requirements of the installed distribution, without extras; versions are those of constraints.txt.
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"
_BLOCK = re.compile(r"<!-- licences -->\n(?:\|.*\n)*")


def refresh(page: str) -> str:
    """Return the page with the packages that are installed with dtprof today."""
    return _BLOCK.sub(lambda _: f"<!-- licences -->\n{_table()}", page)


def required_packages() -> dict[str, Distribution]:
    """Return the distributions that dtprof needs, directly or not, by normalised name."""
    found: dict[str, Distribution] = {}
    open_names = ["dtprof"]
    while open_names:
        name = re.sub(r"[-_.]+", "-", open_names.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform or Python
        needed = [text for text in found[name].requires or [] if "extra ==" not in text]
        open_names += [match[0] for text in needed if (match := re.match(r"[\w.-]+", text))]
    del found["dtprof"]
    return found


def licence(package: Distribution) -> str:
    """Return the licence as the package's metadata has it."""
    stated = package.metadata.get("License-Expression")
    classifiers = [text for text in package.metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    named = classifiers[0].rpartition(":: ")[2] if classifiers else "unknown"
    return stated or package.metadata.get("License") or named


def _table() -> str:
    rows = ["| package | licence |", "|---|---|"]
    rows += [f"| {name} | {licence(package)} |" for name, package in sorted(required_packages().items())]
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
