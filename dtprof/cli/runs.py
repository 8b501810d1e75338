"""`dtprof runs`: the runs in a folder: list, choose, compare and remove them."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import settings
from dtprof.errors import UsageError
from dtprof.typed_quantities import age_seconds, parse_days, parse_number, parse_whole

if TYPE_CHECKING:
    from dtprof.session.run_index import RunFilter
    from dtprof.session.run_retention import Policy

EPILOG = """\
examples:
  dtprof runs                                       what is in dtprof-runs/
  dtprof runs /var/lib/dtprof --since 7d --outcome hang --outcome slow
  dtprof runs --name train --compare                the median step of each, and its change
  dtprof runs --outcome ended --until 30d --prune   what would be removed; with --yes it is

exit status: 0; 1 where a run that was to be removed stays; 2 there is no such folder
"""
MOST = 10**9
_DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "runs",
        help="list the runs in a folder, choose, compare and remove them",
        description="List the runs in a folder, and in folders of users below it: outcome, ranks, duration, size. An "
        "index in the cache folder holds what was read before.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help=f"folder of runs (default: {settings.RUNS})",
    )
    chosen = parser.add_argument_group("which runs")
    chosen.add_argument("--since", metavar="TIME", help="started after TIME: 12h, 7d ago, or 2026-11-20")
    chosen.add_argument("--until", metavar="TIME", help="started before TIME")
    chosen.add_argument(
        "--outcome",
        action="append",
        metavar="OUTCOME",
        help="running, cut-off, ended, stopped, healthy, slow, risk, crash, hang or unknown; several may be given",
    )
    chosen.add_argument("--user", metavar="USER", help="of this user")
    chosen.add_argument("--host", metavar="HOST", help="with a host of this name; * and ? stand for others")
    chosen.add_argument("--name", metavar="NAME", help="with NAME in their name or command; * and ? stand for others")
    chosen.add_argument("--limit", metavar="N", help="the newest N of them")
    parser.add_argument("--diagnose", action="store_true", help="diagnose runs that have no verdict yet, and keep it")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="measure the median step of each, and its change against the run before of the same command and ranks",
    )
    parser.add_argument("--prune", action="store_true", help="remove these runs; without --yes say which would go")
    parser.add_argument(
        "--keep",
        metavar="TIME",
        help="with --prune: keep runs for TIME; hung, slow and crashed ones four times as long",
    )
    parser.add_argument("--max-gb", metavar="N", help="with --prune: of each user keep N GiB, the newest")
    parser.add_argument("--yes", action="store_true", help="with --prune: remove them")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")


def run(arguments: argparse.Namespace) -> int:
    """List, measure or remove."""
    from dtprof.records import run_facts
    from dtprof.report.documents.runs_json import runs_json
    from dtprof.report.text.runs_text import runs_text
    from dtprof.session import stored_runs
    from dtprof.session.run_index import RunFilter

    for outcome in arguments.outcome or ():
        if outcome not in run_facts.OUTCOMES:
            raise UsageError(f"--outcome is {outcome!r}; expected one of {', '.join(run_facts.OUTCOMES)}")
    store = arguments.folder or Path(settings.RUNS)
    wanted = RunFilter(
        since_ns=_time(arguments.since, "--since"),
        until_ns=_time(arguments.until, "--until"),
        outcomes=arguments.outcome or (),
        user=arguments.user or "",
        host=arguments.host or "",
        name=arguments.name or "",
        limit=parse_whole("--limit", arguments.limit, 1, MOST) if arguments.limit else None,
    )
    policy = _policy(arguments)
    problems = stored_runs.diagnose_new(store, wanted) if arguments.diagnose else []
    if arguments.prune:
        return _prune(store, wanted, policy, arguments, problems)
    if arguments.compare:
        runs, unmeasured = stored_runs.measure_steps(store, wanted)
        problems += unmeasured
    else:
        runs = stored_runs.list_runs(store, wanted)
    if arguments.json:
        print(json.dumps(runs_json(runs, problems=problems), indent=1))
        return 0
    print(runs_text(runs, with_steps=arguments.compare))
    for problem in problems:
        print(f"dtprof runs: {problem}", file=sys.stderr)
    if runs:
        from dtprof.cli.next_command import say_next

        say_next("diagnose" if runs[0].outcome in ("hang", "crash", "cut-off") else "summary", store / runs[0].name)
    return 0


def _prune(
    store: Path, wanted: "RunFilter", policy: "Policy | None", arguments: argparse.Namespace, problems: list[str]
) -> int:
    """Remove runs, or say which would go."""
    from dtprof.formatting import format_bytes, join_lines, plural
    from dtprof.report.documents.runs_json import runs_json
    from dtprof.session import stored_runs

    going = stored_runs.surplus(store, wanted, policy)
    runs = [facts for facts, _ in going]
    stays = stored_runs.remove(store, runs) if arguments.yes else []
    if arguments.json:
        document = runs_json(runs, problems=[*problems, *stays])
        print(json.dumps({**document, "removed": arguments.yes}, indent=1))
        return 1 if stays else 0
    if not arguments.yes:
        print(join_lines(f"{facts.name}  {facts.outcome}  {format_bytes(facts.nbytes)}  {why}" for facts, why in going))
    size = format_bytes(sum(facts.nbytes for facts in runs))
    count = plural(len(runs) - len(stays), "run")
    print(f"{count} removed" if arguments.yes else f"{count}, {size} would be removed: add --yes to remove them")
    for problem in (*problems, *stays):
        print(f"dtprof runs: {problem}", file=sys.stderr)
    return 1 if stays else 0


def _policy(arguments: argparse.Namespace) -> "Policy | None":
    from dtprof.session.run_retention import Policy

    if arguments.prune and arguments.compare:
        raise UsageError(
            "--compare was given with --prune; expected one of them: list the runs first, then remove them"
        )
    if not arguments.prune:
        for option, value in (("--keep", arguments.keep), ("--max-gb", arguments.max_gb), ("--yes", arguments.yes)):
            if value:
                raise UsageError(f"{option} was given without --prune; expected both, for example: dtprof runs --prune")
    if arguments.keep is None and arguments.max_gb is None:
        return None
    days = 0.0
    if arguments.keep is not None:
        days = parse_days("--keep", arguments.keep)
    return Policy(
        keep_days=days,
        keep_notable_days=4 * days,
        max_gb_per_user=parse_number("--max-gb", arguments.max_gb, example="50", below=MOST)
        if arguments.max_gb is not None
        else 0.0,
    )


def _time(text: str | None, option: str) -> int:
    """Return a moment in ns of the wall clock from an age or a date; 0 for none."""
    if not text:
        return 0
    if (age_s := age_seconds(text)) is not None:
        return time.time_ns() - int(age_s * 1e9)
    for form in _DATES:
        try:
            return int(time.mktime(time.strptime(text.strip(), form)) * 1e9)
        except (ValueError, OverflowError):
            continue
    raise UsageError(f"{option} is {text!r}; expected an age such as 12h or 7d, or a date such as 2026-11-20")
