"""`dtprof import`: files of other tools as a run."""

import argparse
import sys
from pathlib import Path

from dtprof.cli.parsers import output_path
from dtprof.formatting import plural

EPILOG = """\
formats, recognised by what the files hold:
  torch.profiler (Kineto)   a .json or .json.gz of each rank
  Flight Recorder           a dump of each rank, pickle or JSON
  Horovod                   the timeline of rank 0
  XLA, JAX                  .trace.json.gz of the profiler, one for each host
  StragglerAnalysis         trace-NAME.parquet (needs the extra `parquet`)

examples:
  dtprof import traces/rank0.json.gz traces/rank1.json.gz -o dtprof-runs/imported
  dtprof import traces -o dtprof-runs/imported

exit status: 0; 2 the files cannot be read or are of no known format, or the output cannot be written
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "import",
        help="convert traces of other tools into a run",
        description="Convert what another tool recorded into a run: summary, report, compare and the Python API work "
        "on it. What the format does not record is listed under cannot_tell.",
        epilog=EPILOG,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files of one job, or directories of them")
    parser.add_argument("-o", "--output", type=output_path, required=True, metavar="RUN", help="run directory to write")
    parser.add_argument("--force", action="store_true", help="write over a run")


def run(arguments: argparse.Namespace) -> int:
    """Write the run and print its contents."""
    from dtprof.session.run_imports import import_run

    imported, left_out = import_run(arguments.paths, arguments.output, force=arguments.force)
    if left_out:
        more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        print(f"dtprof: of no known format and left out: {', '.join(left_out[:5])}{more}", file=sys.stderr)
    events = sum(len(rank.records) for rank in imported.ranks)
    print(f"{imported.format}: {plural(len(imported.ranks), 'rank')}, {events:,} records in {arguments.output}")
    for reason in imported.cannot_tell:
        print(f"cannot tell {reason}")
    print(f"next: dtprof summary {arguments.output}")
    return 0
