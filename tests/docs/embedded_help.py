"""The `--help` texts that docs/reference/cli.md shows, each in a block behind a marker.

python -m tests.docs.embedded_help    brings the page up to date
"""

import argparse
import os
import re
from pathlib import Path

from dtprof.cli.main import COMMANDS, build_parser

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
COLUMNS = "100"
_BLOCK = re.compile(r"<!-- help: (?P<name>[\w-]+) -->\n```text\n(?P<text>.*?)```\n", re.DOTALL)


def help_texts() -> dict[str, str]:
    """Return the help of the program, as `dtprof`, and of every command, at a fixed width."""
    os.environ["COLUMNS"] = COLUMNS
    parser = build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"dtprof": parser.format_help()} | {name: subparsers.choices[name].format_help() for name in COMMANDS}


def shown_texts(page: str) -> dict[str, str]:
    """Return the blocks of the page by the name in their marker."""
    return {match["name"]: match["text"] for match in _BLOCK.finditer(page)}


def refresh(page: str) -> str:
    """Return the page with every block as the program prints it today."""
    texts = help_texts()
    return _BLOCK.sub(lambda m: f"<!-- help: {m['name']} -->\n```text\n{texts[m['name']]}```\n", page)


if __name__ == "__main__":
    PAGE.write_text(refresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
