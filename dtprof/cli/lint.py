"""`dtprof lint`: collectives in source that only some ranks issue."""

import argparse
import json
from pathlib import Path

from dtprof.cli.next_command import say_next

EPILOG = """\
examples:
  dtprof lint train.py
  dtprof lint src/ --json
  dtprof lint train.py --run runs/now      what a run shows of each finding

A comment `# dtprof: ignore WHY` on the line, or alone on the line above, covers a finding.
Kinds of findings: docs/reference/lint.md.
exit status: 0 nothing found, 1 something found, 2 a file cannot be read, or there is none
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "lint",
        help="find collectives in source that only some ranks issue",
        description="Read Python source, without running it, and find collectives that some ranks of a group issue and "
        "others do not: under conditions on the rank, after early exits, in loops of unequal length, in exception "
        "handlers.",
        epilog=EPILOG,
    )
    parser.add_argument("paths", type=Path, metavar="PATH", nargs="+", help="Python file, or directory of those")
    parser.add_argument(
        "--run",
        type=Path,
        dest="run_directory",
        metavar="RUN",
        help="run directory of this source: what its ranks issued confirms or clears each finding",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    from dtprof.report.documents.lint_json import lint_json
    from dtprof.report.text.lint_text import lint_text
    from dtprof.session.source_lint import lint_sources

    result = lint_sources(arguments.paths, run_directory=arguments.run_directory)
    has_findings = any(finding.severity in ("error", "warning") for finding in result.findings)
    print(json.dumps(lint_json(result), indent=1) if arguments.json else lint_text(result))
    if has_findings and not arguments.json and arguments.run_directory is None:
        say_next("lint", *arguments.paths, "--run", "RUN")
    if result.unreadable:
        return 2
    return 1 if has_findings else 0
