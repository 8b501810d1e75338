"""`dtprof whatif`: the gain of a change, predicted by replaying a run."""

import argparse
import json

from dtprof.analysis.whatif.whatif_changes import CHANGES, OPTIONS, parse_fixes
from dtprof.cli import engine_options, run_argument
from dtprof.cli.parsers import GivenOnce

EPILOG = """\
examples:
  dtprof whatif dtprof-runs/20261121-101500-train
  dtprof whatif dtprof-runs/20261121-101500-train --fix rank=3
  dtprof whatif dtprof-runs/20261121-101500-train --network 2x --overlap full --json | jq .scenarios

Several changes make one scenario; without any, each single one is listed, by gain. A gain is the share of the replayed
step that goes; the replay error says how far the replay of the unchanged run is off the measured step. Above 5 %
nothing is predicted. docs/how-to/predict-a-change.md.
exit status: 0, also where nothing can be predicted; 2 the run
cannot be read, or has nothing of what a change names
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "whatif",
        help="predict what a change would gain",
        description="Predict the step time of a run after a change, by replaying its operations: a slow rank or host "
        "like the others, a faster network, another pipeline schedule, more ranks.",
        epilog=EPILOG,
    )
    run_argument.add_run(parser)
    changes = parser.add_argument_group("changes")
    changes.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="WHAT=NAME",
        help="rank=R[,R...], host=H, stage=N|last: as fast as the others; op=NAME, phase=NAME: its ideal time (phases "
        "data and checkpoint: none); repeatable",
    )
    for name in OPTIONS.values():
        changes.add_argument(f"--{name}", action=GivenOnce, metavar=CHANGES[name].metavar, help=CHANGES[name].help)
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction."""
    from dtprof.report.documents.whatif_json import whatif_json
    from dtprof.report.text.whatif_text import whatif_text
    from dtprof.session.engines import open_run
    from dtprof.session.whatif_prediction import predict

    fixes = parse_fixes(arguments.fix, {name: getattr(arguments, name) for name in OPTIONS})
    engine = engine_options.chosen_engine(arguments)
    result = predict(open_run(arguments.run_directory, engine), engine, fixes)
    print(json.dumps(whatif_json(result), indent=1) if arguments.json else whatif_text(result))
    return 0
