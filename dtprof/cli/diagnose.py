"""`dtprof diagnose`: which rank, which collective, which line, and what to do."""

import argparse
import json
from pathlib import Path

EPILOG = """\
example:
  dtprof diagnose dtprof-runs/20261121-101500-train

exit status: 0 no error or warning found, 1 something found, 2 the input cannot be read
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "diagnose",
        help="say which rank, which collective and which line hold a job up",
        description="Read a run, finished, running or killed, and name the cause of a hang or a crash.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, schema 1")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict."""
    from dtprof.cli.inspection import diagnose_run
    from dtprof.report.verdict_json import verdict_json
    from dtprof.report.verdict_text import verdict_text

    verdict = diagnose_run(arguments.path)
    print(json.dumps(verdict_json(verdict), indent=1) if arguments.json else verdict_text(verdict))
    return 1 if any(finding.severity in ("error", "warning") for finding in verdict.findings) else 0
