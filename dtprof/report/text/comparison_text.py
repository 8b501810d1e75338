"""A comparison of two runs in text of 80 columns: the steps in a sentence, the differences in a table."""

import shlex
from collections.abc import Sequence

from dtprof.analysis.comparison.comparison_series import BUBBLE_FRACTION, COLLECTIVES, JOB, RANKS, STEP, Figure
from dtprof.analysis.comparison.run_comparison import PEAK, Comparison, FigureChange, RunSide
from dtprof.analysis.steps.throughput import RATES
from dtprof.formatting import UNKNOWN, format_bytes, format_ns, format_rate, format_table, join_lines, plural, shorten
from dtprof.job.axes import axis_words
from dtprof.report.text.labelled_lines import WIDTH, labelled, wrap_text

LABEL = 13
"""As wide as "not compared" and a blank."""
MAX_ROWS = 8
NO_DIFFERENCE = "no difference beyond the noise"
_HEAD = ("A", "B", "B - A", "between", "detectable")
_TABLE_NAMES = {JOB: "the job", COLLECTIVES: "collectives", RANKS: "ranks"}
_BETWEEN_RUNS = (
    "two runs do not show how much runs of one job vary (another node, another hour): to measure that, compare two "
    "runs of the same job"
)


def comparison_text(result: Comparison) -> str:
    """Return the text."""
    lines = [*_side_lines("A", result.a), *_side_lines("B", result.b), *_labelled("steps", step_sentence(result))]
    if _judged(result.changes):
        lines += _labelled("all figures", _overall_sentence(result))
    for table in (JOB, COLLECTIVES, RANKS):
        lines += _table_lines(result, table)
    if result.changes:
        lines += [""]
    for reason in result.cannot_compare:
        lines += _labelled("not compared", reason)
    if result.differs:
        lines += _labelled("caveat", _BETWEEN_RUNS)
    lines.append(f"{'next':<{LABEL}}dtprof report {shlex.quote(result.b.run)}")
    return join_lines(lines)


def _labelled(label: str, text: str) -> list[str]:
    return labelled(label, text, LABEL)


def _side_lines(name: str, side: RunSide) -> list[str]:
    steps = f"steps {side.used[0]} to {side.used[1]} of {side.num_steps}" if side.used else "no steps to measure"
    facts = f": {plural(side.world_size, 'rank')}, {steps}"
    return _labelled(name, shorten(side.run, WIDTH - LABEL - len(facts)) + facts)


def step_sentence(result: Comparison) -> str:
    """Describe how the step times of both runs differ."""
    step = result.step
    if step is None:
        return "cannot be compared"
    if step.low is None or step.high is None or step.difference is None:
        return f"not judged: {step.reason}"
    between = f"between {_signed(step.low, step)} and {_signed(step.high, step)}"
    share = f" ({100 * step.share:+.1f} %)" if step.share is not None else ""
    if step.verdict == "none":
        seen = format_ns(step.detectable)
        return f"{NO_DIFFERENCE}: B - A is {between}; {seen} a step would be detected in 4 of 5 comparisons"
    longer = f"{'longer' if step.difference > 0 else 'shorter'} in B by {format_ns(abs(step.difference))}{share}"
    if step.verdict == "negligible":
        return f"{longer}, under the threshold of {_percent(result.at_least)}"
    return f"{longer}: {between}"


def _judged(changes: Sequence[FigureChange]) -> list[FigureChange]:
    return [change for change in changes if change.verdict != "unknown"]


def _overall_sentence(result: Comparison) -> str:
    differing = [change for change in result.changes if change.differs]
    judged = _judged(result.changes)
    small = sum(change.verdict == "negligible" for change in judged)
    sure = f"all intervals hold jointly at {_percent(result.confidence)} confidence"
    less = f"; {small} by less than {_percent(result.at_least)}" if small else ""
    if not differing:
        return f"{NO_DIFFERENCE} in any of {len(judged)}{less}; {sure}"
    return f"{len(differing)} of {len(judged)} differ{less}; {sure}"


def _table_lines(result: Comparison, table: str) -> list[str]:
    changes = list(result.of_table(table))
    if not changes:
        return []
    if table == JOB:
        shown = [change for change in changes if not _is_small(change, result.step)]
    else:
        shown = sorted((c for c in changes if c.differs), key=lambda change: _weight(change, result.step))[:MAX_ROWS]
        order = list(dict.fromkeys(map(_collective, shown)))  # figures of a collective stand under its name
        shown.sort(key=lambda change: order.index(_collective(change)))
    num_columns = (
        len(_HEAD) + 1 if table == JOB else len(_HEAD)
    )  # differences were detected: the last column adds nothing
    rows = [row[:num_columns] for row in [(_TABLE_NAMES[table], *_HEAD), *map(_cells, shown)]]
    lines = ["", *_under_collectives(shown, format_table(rows))] if shown else [""]
    left = [change for change in changes if change not in shown]
    differing = sum(change.differs for change in left)
    if differing:
        lines += [f"{_TABLE_NAMES[table]}, {differing} more differ: see --json"]
    quiet = [change for change in left if change.verdict in ("none", "negligible")]
    if quiet:
        said = NO_DIFFERENCE
        if any(change.verdict == "negligible" for change in quiet):
            said += f", or less than {_percent(result.at_least)}"
        other = "other " if shown else ""
        lines += _sentence(f"{_TABLE_NAMES[table]}, {plural(len(quiet), other + 'figure')}: {said}")
    unknown = [change for change in left if change.verdict == "unknown" and change.figure.name != PEAK]
    if unknown:
        lines += _sentence(f"{_TABLE_NAMES[table]}, {plural(len(unknown), 'figure')} not judged: {unknown[0].reason}")
    return lines


def _sentence(text: str) -> list[str]:
    return wrap_text(text)


def _is_small(change: FigureChange, step: FigureChange | None) -> bool:
    """Say whether a time is not worth a row: within the noise, and not a hundredth of the step in either run."""
    if change.differs or change.figure.unit != "ns" or step is None or change.figure.name == STEP:
        return False
    if change.a is None or change.b is None:
        return True
    return max(change.a, change.b) < 0.01 * max(step.a or 0.0, step.b or 0.0)


def _weight(change: FigureChange, step: FigureChange | None) -> tuple[int, float]:
    """Order the differences: times by size, then the rest."""
    is_time = change.figure.unit == "ns"
    return (0 if is_time else 1), -abs(change.difference or 0.0) if is_time or step is None else 0.0


def describe_change(change: FigureChange) -> tuple[str, str, str, str, str, str]:
    """Return name, A, B, difference, its interval, and the smallest difference that would be detected."""
    between, seen = "", ""
    if change.low is not None and change.high is not None:
        low, high = _signed(change.low, change), _signed(change.high, change)
        same_unit = low.split()[1:] == high.split()[1:]
        between = f"{low.split()[0] if same_unit else low} .. {high}"
    if change.detectable is not None:
        seen = _format(change.detectable, change.figure)
    difference = UNKNOWN if change.difference is None else _signed(change.difference, change)
    a, b = (UNKNOWN if value is None else _format(value, change.figure) for value in (change.a, change.b))
    return _name(change), a, b, difference, between, seen


def _cells(change: FigureChange) -> tuple[str, ...]:
    name, *rest = describe_change(change)
    mark = "* " if change.differs else "  "
    return (mark + (_plain_name(change.figure) if _collective(change) else name), *rest)


def _under_collectives(shown: Sequence[FigureChange], table: Sequence[str]) -> list[str]:
    """Return the lines of a table, the name of each collective on a line of its own: beside numbers it has no room."""
    lines = [table[0]]
    for previous, change, line in zip([None, *shown], shown, table[1:], strict=False):
        name = _collective(change)
        if name and (previous is None or name != _collective(previous)):
            lines.append(shorten(name, WIDTH))
        lines.append(line)
    return lines


def _collective(change: FigureChange) -> str:
    """Return operation, component and group of a collective; nothing of other figures."""
    figure = change.figure
    if figure.table != COLLECTIVES:
        return ""
    called = f" ({figure.api})" if figure.api and figure.api not in figure.op else ""
    return f"{figure.op}{called} {axis_words(figure.group)}"


def _name(change: FigureChange) -> str:
    plain = _plain_name(change.figure)
    if change.figure.table == RANKS:
        return f"rank {change.figure.rank} {plain}"
    return f"{_collective(change)}: {plain}" if change.figure.table == COLLECTIVES else plain


def _plain_name(figure: Figure) -> str:
    if figure.name == PEAK:
        return "peak memory"
    if figure.name == BUBBLE_FRACTION:
        return "bubble share"  # of the pipeline's window; "bubble" is the time
    if figure.name in RATES:
        return f"mean {RATES[figure.name]}"  # over the time of the steps: the summary's tokens_per_s is the median
    return figure.name.removesuffix("_ns").removesuffix("_bytes").removesuffix("_fraction").replace("_", " ")


def _format(value: float, figure: Figure) -> str:
    if figure.unit == "ns":
        return format_ns(value)
    if figure.unit == "bytes":
        return format_bytes(value)
    if figure.unit == "fraction":
        return f"{100 * value:.1f} %"
    return format_rate(value) if figure.unit.endswith("/s") else f"{value:.4g}"


def _signed(value: float, change: FigureChange) -> str:
    text = _format(abs(value), change.figure)
    sign = "+" if value > 0 else "-" if value < 0 else ""
    return f"{sign}{text}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g} %"
