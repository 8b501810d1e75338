"""`dtprof summary`: the figures of a run as text, JSON or Markdown."""

import argparse
import json

from dtprof.cli import engine_options, run_argument

EPILOG = """\
examples:
  dtprof summary dtprof-runs/20261121-101500-train
  dtprof summary dtprof-runs/20261121-101500-train --json | jq .steps.duration_ns.median
  dtprof summary dtprof-runs/20261121-101500-train --markdown | gh pr comment 42 --body-file -

Every figure is defined in docs/reference/metrics.md.
exit status: 0; 2 the run cannot be read
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "summary",
        help="print where the time of a run goes",
        description="Print what is in a run: steps and their parts on every rank, collectives, stragglers, memory, "
        "and the quality of the measurement.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    form.add_argument("--markdown", action="store_true", help="print Markdown for an issue or a pull request")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary."""
    from dtprof.report.documents.summary_json import summary_json
    from dtprof.report.text.summary_markdown import summary_markdown
    from dtprof.report.text.summary_text import summary_text
    from dtprof.session.engines import open_run
    from dtprof.session.run_measurement import summarise_opened

    engine = engine_options.chosen_engine(arguments)
    summary = summarise_opened(open_run(arguments.run_directory, engine), engine)
    if arguments.json:
        print(indented(summary_json(summary)))
    else:
        print(summary_markdown(summary) if arguments.markdown else summary_text(summary))
    return 0


def indented(document: object) -> str:
    """Return json.dumps(document, indent=1), which takes three times as long."""
    import msgspec

    try:
        return msgspec.json.format(json.dumps(document), indent=1)
    except msgspec.DecodeError:  # a name that is no UTF-8, as json.dumps writes it
        return json.dumps(document, indent=1)
