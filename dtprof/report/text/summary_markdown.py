"""A summary as Markdown for an issue or a pull request, as GitHub renders it.

Names come from the program and may hold anything: they stand in code, where no mention, link or tag is understood.
"""

import shlex
from collections.abc import Sequence
from html import escape

from dtprof.analysis.caveats import condense_caveats
from dtprof.analysis.communication.axis_collectives import AxisCollectives, collectives_by_axis
from dtprof.analysis.rank_exits import EndState
from dtprof.analysis.results import PARTS, Caveat, Summary
from dtprof.formatting import UNKNOWN, format_bytes, format_count, format_fraction, format_ns, plural, shorten
from dtprof.report.text.summary_text import (
    MAX_HOT_LINES,
    group_words,
    operation_name,
    share_cells,
    waiting_words,
)
from dtprof.report.wording import (
    advice_words,
    clock_words,
    costliest_line_words,
    hot_line_words,
    input_words,
    missing_words,
    reductions_words,
)

MAX_RANKS = 16
MAX_COLLECTIVES = 10
MAX_NAME = 160
_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ./,=:%")


def summary_markdown(summary: Summary) -> str:
    """Return the Markdown, without a line feed at its end."""
    sections = [
        _headline(summary),
        _rank_table(summary),
        _collective_table(collectives_by_axis(summary)),
        _notes(summary),
        _caveats(condense_caveats(summary.cannot_tell)),
    ]
    return "\n\n".join(section for section in sections if section)


def as_code(text: str) -> str:
    """Return a name as code, every character that Markdown or HTML may take for its own written as its number."""
    plain = shorten(" ".join(text.split()), MAX_NAME)
    return f"<code>{''.join(letter if letter in _PLAIN else f'&#{ord(letter)};' for letter in plain)}</code>"


def _headline(summary: Summary) -> str:
    parts = [f"{plural(summary.world_size, 'rank')} on {plural(len(summary.hosts), 'host')}"]
    parts += [escape(summary.backend)] if summary.backend else []
    parts += [f"torch {escape(summary.torch)}"] if summary.torch else []
    lines = [f"### dtprof: {as_code(' '.join(map(shlex.quote, summary.command)) or summary.run)}", "", ", ".join(parts)]
    steps = summary.steps
    if steps.used is not None and steps.duration_ns is not None:
        first, last = steps.used
        spread = steps.duration_ns
        lines[-1] += (
            f"; **{format_ns(spread.median)} a step** (median of steps {first} to {last}; p10 {format_ns(spread.p10)}, "
            f"p90 {format_ns(spread.p90)})"
        )
    if missing_words(summary):
        lines[-1] += f"; **{missing_words(summary)}**"
    if summary.advice is not None and summary.advice.gain is not None:
        lines += ["", f"**Advice**: {escape(advice_words(summary))}"]
    return "\n".join(lines)


def _rank_table(summary: Summary) -> str:
    measured = [rank for rank in summary.ranks if rank.step_ns is not None and rank.partition_ns is not None]
    if not measured:
        return ""
    parts = [part for part in PARTS if any((rank.partition_ns or {})[part] != 0 for rank in measured)]
    rows = [["rank", "step", *(part.replace("_", " ") for part in parts)]]
    by_wait = sorted(measured, key=lambda rank: (rank.partition_ns or {})["exposed_wait"] or 0)
    shown = measured if len(measured) <= MAX_RANKS else [*by_wait[: MAX_RANKS // 2], *by_wait[-MAX_RANKS // 2 :]]
    for rank in shown:
        cells = [format_ns(rank.step_ns), *(format_ns((rank.partition_ns or {})[part]) for part in parts)]
        rows.append([str(rank.rank), *cells])
    rows.append(["**share**", *share_cells(summary, parts)])
    more = len(measured) - len(shown)
    note = f"\n\n{plural(more, 'more rank')}: the table shows those that wait least and most." if more else ""
    return _table(rows) + note


def _collective_table(collectives: Sequence[AxisCollectives]) -> str:
    if not collectives:
        return ""
    rows = [["operation", "groups", "count", "bytes", "time", "wait", "blocked", "overlap"]]
    for row in collectives[:MAX_COLLECTIVES]:
        overlap = UNKNOWN if row.overlap is None else format_fraction(row.overlap)
        times = [format_ns(row.duration_ns), format_ns(row.wait_ns), format_ns(row.exposed_ns)]
        rows.append(
            [
                as_code(operation_name(row)),
                as_code(group_words(row)),
                format_count(row.count),
                format_bytes(row.bytes),
                *times,
                overlap,
            ]
        )
    more = len(collectives) - MAX_COLLECTIVES
    return _table(rows, left=2) + (
        f"\n\n{plural(more, 'more operation')}: see `dtprof summary --json` or the report." if more > 0 else ""
    )


def _notes(summary: Summary) -> str:
    lines = []
    if summary.pipeline is not None:
        pipeline = summary.pipeline
        theory = "" if pipeline.theory_fraction is None else f" (theory {format_fraction(pipeline.theory_fraction)})"
        lines.append(
            f"- pipeline: {as_code(pipeline.schedule)}, {pipeline.stages} stages, {pipeline.microbatches} "
            f"microbatches, bubble **{format_fraction(pipeline.bubble_fraction)}**{theory}"
        )
    lines += [f"- hot line: {as_code(hot_line_words(row))}" for row in summary.hot_lines[:MAX_HOT_LINES]]
    costliest = costliest_line_words(summary)
    if costliest:
        lines.append(f"- call site: {as_code(costliest)}")
    lines += [f"- gradients: {as_code(reductions_words(row))}" for row in summary.repeated_reductions[:1]]
    for straggler in (summary.stragglers or ())[:3]:
        cause = f": {as_code(straggler.cause)}" if straggler.cause else ""
        cause += f"; sampled {as_code(straggler.sampled.words)}" if straggler.sampled else ""
        cost = f", {waiting_words(straggler, summary.world_size)}" if straggler.blame_ns_per_step else ""
        lines.append(f"- straggler: **rank {straggler.rank}**{cost}{cause}")
    lines += [f"- input: {input_words(row)}" for row in summary.uneven_input]
    peaks = [(rank.peak_bytes, rank.rank) for rank in summary.ranks if rank.peak_bytes is not None]
    if peaks:
        lines.append(f"- peak memory: {format_bytes(max(peaks)[0])} on rank {max(peaks)[1]}")
    exits = sorted({rank.ended.words for rank in summary.ranks if rank.ended.state != EndState.FINISHED})
    if exits:
        lines.append(f"- ended: {', '.join(map(escape, exits))}")
    share = summary.overhead.share_of_step
    cost = "not known" if share is None else f"{100 * share:.2f} % of a step"
    clock = "not known" if summary.time_error_ns is None else format_ns(summary.time_error_ns)
    if summary.device.ranks:
        lines.append(f"- times: {clock_words(summary)}")
    lines.append(f"- overhead: {cost}; dropped {format_count(summary.dropped_events)}; clock error {clock}")
    return "\n".join(lines)


def _caveats(caveats: Sequence[Caveat]) -> str:
    if not caveats:
        return ""
    lines = "\n".join(f"- {as_code(caveat)}" for caveat in caveats)
    return f"<details><summary>{plural(len(caveats), 'caveat')}</summary>\n\n{lines}\n\n</details>"


def _table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    head, *body = rows
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))
