"""`dtprof check`: check a run against thresholds, for continuous integration."""

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dtprof.cli import engine_options
from dtprof.cli.next_command import say_next
from dtprof.errors import UsageError
from dtprof.typed_quantities import parse_milliseconds, parse_number, parse_share, parse_size

if TYPE_CHECKING:
    from dtprof.analysis.comparison.thresholds import Threshold

EPILOG = """\
examples:
  dtprof check runs/now --max-bubble 25% --max-exposed 20% --max-step-ms 300 --no-risk
  dtprof check runs/now --min-tokens-per-s 25000
  dtprof check runs/now --max-slowdown-against runs/baseline --max-slowdown 5%

A figure that is not known fails, with the reason, unless --allow-unknown is given. Figures: docs/reference/metrics.md.
exit status: 0 all thresholds are met; 1 one is not; 2 a run cannot be read, or dtprof was used wrongly
"""


class _Option(NamedTuple):
    """An option that sets the most a figure may be, or the least."""

    name: str
    figure: str
    metavar: str
    parse: Callable[[str, str], float]
    help: str

    @property
    def is_least(self) -> bool:
        """Say whether the figure may not be below."""
        return self.name.startswith("--min-")


_parse_rate = functools.partial(parse_number, example="25000")

OPTIONS = (
    _Option("--max-step-ms", "step_ns", "MS", parse_milliseconds, "step time, mean over measured steps and ranks"),
    _Option(
        "--min-tokens-per-s",
        "tokens_per_s",
        "N",
        _parse_rate,
        "tokens per second of the whole job, over the measured steps",
    ),
    _Option("--min-samples-per-s", "samples_per_s", "N", _parse_rate, "samples per second of the whole job"),
    _Option(
        "--max-exposed",
        "exposed_fraction",
        "SHARE",
        parse_share,
        "exposed communication as a share of the step, waits included",
    ),
    _Option(
        "--max-wait", "wait_fraction", "SHARE", parse_share, "share of the step in which ranks wait for a late rank"
    ),
    _Option(
        "--max-bubble",
        "bubble_fraction",
        "SHARE",
        parse_share,
        "pipeline bubbles as a share of the windows of the pipeline",
    ),
    _Option("--max-peak-memory", "peak_bytes", "SIZE", parse_size, "peak memory of any rank, for example 8GiB"),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "check",
        help="check a run against thresholds, for continuous integration",
        description="Check the figures of a run against thresholds: which is not met, by how much, and with what "
        "confidence.",
        epilog=EPILOG,
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="run directory")
    for option in OPTIONS:
        parser.add_argument(option.name, metavar=option.metavar, help=option.help)
    parser.add_argument(
        "--max-slowdown-against",
        type=Path,
        metavar="BASELINE",
        help="run directory: steps may not take longer than there, beyond the noise of both",
    )
    parser.add_argument(
        "--max-slowdown", metavar="SHARE", help="how much longer steps may take than in BASELINE (default: 0%%)"
    )
    parser.add_argument("--no-risk", action="store_true", help="fail where dtprof diagnose finds an error or a warning")
    parser.add_argument("--allow-unknown", action="store_true", help="an unknown figure does not fail")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the outcome of each threshold; 1 where one is not met."""
    from dtprof.analysis.comparison.thresholds import Threshold
    from dtprof.records import remote
    from dtprof.report.documents.check_json import check_json
    from dtprof.report.text.check_text import check_text
    from dtprof.session.threshold_checks import check_run, select_failing

    thresholds = []
    for option in OPTIONS:
        text = getattr(arguments, option.name.removeprefix("--").replace("-", "_"))
        if text is not None:
            bound = option.parse(option.name, text)
            shown = f"{option.name} {text}"
            thresholds.append(Threshold(option=shown, figure=option.figure, bound=bound, is_least=option.is_least))
    slowdown = _slowdown(arguments)
    if not (thresholds or slowdown or arguments.no_risk):
        raise UsageError(
            "no threshold was given; expected at least one, for example: dtprof check RUN --max-step-ms 300"
        )
    results = check_run(
        arguments.run_directory,
        engine_options.chosen_engine(arguments),
        thresholds=thresholds,
        slowdown=slowdown,
        baseline=arguments.max_slowdown_against,
        no_risk=arguments.no_risk,
    )
    failing = select_failing(results, allow_unknown=arguments.allow_unknown)
    passed = not failing
    name = remote.named(arguments.run_directory)
    if arguments.json:
        print(json.dumps(check_json(name, results, passed=passed, allow_unknown=arguments.allow_unknown), indent=1))
    else:
        print(check_text(name, results, passed=passed, allow_unknown=arguments.allow_unknown))
        say_next(*_following(arguments, {result.figure for result in failing}))
    return 0 if passed else 1


def _following(arguments: argparse.Namespace, failed: set[str]) -> list[str | Path]:
    """Return the command that explains what failed."""
    from dtprof.analysis.comparison.thresholds import FINDINGS, SLOWDOWN

    run: Path = arguments.run_directory
    if FINDINGS in failed:
        return ["diagnose", run]
    return ["compare", arguments.max_slowdown_against, run] if SLOWDOWN in failed else ["summary", run]


def _slowdown(arguments: argparse.Namespace) -> "Threshold | None":
    from dtprof.analysis.comparison.thresholds import SLOWDOWN, Threshold
    from dtprof.records import remote

    baseline, text = arguments.max_slowdown_against, arguments.max_slowdown
    if baseline is None:
        if text is not None:
            raise UsageError(
                "--max-slowdown was given without a baseline; expected --max-slowdown-against BASELINE beside it"
            )
        return None
    most = parse_share("--max-slowdown", text, most=math.inf) if text is not None else 0.0
    allowed = f" --max-slowdown {text}" if text is not None else ""
    return Threshold(option=f"--max-slowdown-against {remote.named(baseline)}{allowed}", figure=SLOWDOWN, bound=most)
