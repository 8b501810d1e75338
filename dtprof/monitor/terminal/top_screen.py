"""The screen of `dtprof top`: the job, its alarms, and a row a rank; the ranks that matter first where not all fit."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dtprof.analysis.results import RankResult, Summary, exposed_of
from dtprof.formatting import UNKNOWN, format_bytes, format_count, format_ns, format_rate, plural
from dtprof.monitor.rank_activity import RankActivity
from dtprof.monitor.run_monitor import JobSnapshot
from dtprof.report.text.labelled_lines import wrap_text
from dtprof.report.wording import advice_words, costliest_line_words

WIDTH = 80
FEWEST_RANKS = 3
MAX_ALARM_LINES = 3
"""Of one alarm."""
LONG_NS = 1_000_000_000
"""For which a rank is shown to be at one thing in another colour."""
LEAST_DOING = 14
"""Columns of the terminal kept for the activity of a rank; on a narrow one, other columns give way."""
_COLUMNS = ("rank", "step", "step time", "comm", "wait", "memory", "for")
_LEFT_OUT_FIRST = ("comm", "memory", "wait", "step time", "for", "step")


def render_reading(run: Path, num_ranks: int) -> Group:
    """Return the screen before the records have been read."""
    title = Text.assemble((run.name or str(run), "bold"), no_wrap=True, overflow="ellipsis")
    return Group(title, Text(f"reading {format_count(num_ranks)} rank{'' if num_ranks == 1 else 's'} ..."))


def render_screen(snapshot: JobSnapshot, run: Path, *, height: int, width: int = WIDTH, keys: str = "q quits") -> Group:
    """Return the screen for a terminal of so many lines.

    Parameters:
        moment: what the last poll gave.
        run: the run directory.
        height: lines there are.
        width: columns there are; no more than 80 are used.
        keys: what the last line says of keys; empty where there is nobody to press them.
    """
    width = min(width, WIDTH)
    head = [*_head(snapshot, run), *_alarms(snapshot, run, width)]
    advice = _advice(snapshot.summary, width)
    if len(head) + len(advice) + FEWEST_RANKS + 3 <= height:
        head += advice
    costliest = _costliest_line(snapshot.summary, width)
    if len(head) + len(costliest) + FEWEST_RANKS + 3 <= height:
        head += costliest
    room = max(FEWEST_RANKS, height - len(head) - 3)
    shown = choose_ranks(snapshot.ranks, snapshot.summary, room)
    rest = len(snapshot.ranks) - len(shown)
    foot = f"{plural(rest, 'more rank')}, none of them in worse state" if rest else ""
    foot = "  ".join(filter(None, (foot, keys)))
    table = [_table(shown, snapshot.summary, width)] if shown else []
    hints = [Text(foot, style="dim", no_wrap=True, overflow="ellipsis")] if foot else []
    return Group(*head, *table, *hints)


def _head(snapshot: JobSnapshot, run: Path) -> list[Text]:
    summary = snapshot.summary
    state = "ended" if snapshot.has_ended else "running"
    if snapshot.has_ended and snapshot.exit_status is not None:
        state = f"ended with exit status {snapshot.exit_status}"
    elif snapshot.job_problem:
        state = "cannot tell whether it goes on"
    title = Text.assemble((run.name or str(run), "bold"), f"  {state}", no_wrap=True, overflow="ellipsis")
    if summary is None:
        ranks = plural(len(snapshot.ranks), "rank")
        known = f"{ranks}, step {format_count(snapshot.step)}; working out their means ..."
        return [title, Text(known if snapshot.ranks else "no rank has recorded anything yet")]
    hosts = len({rank.host for rank in snapshot.ranks})
    facts = [
        f"{format_count(len(snapshot.ranks))} of {plural(summary.world_size, 'rank')} on {plural(hosts, 'host')}",
        summary.backend or "",
        f"step {format_count(snapshot.step)}",
    ]
    lines = (", ".join(filter(None, some)) for some in (facts, _step_facts(summary)))
    return [title, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line)]


def _step_facts(summary: Summary) -> list[str]:
    spread, throughput, pipeline = summary.steps.duration_ns, summary.throughput, summary.pipeline
    facts = [f"{format_ns(spread.median)} a step (p90 {format_ns(spread.p90)})"] if spread is not None else []
    if throughput is not None and throughput.tokens_per_s is not None:
        facts.append(f"{format_rate(throughput.tokens_per_s)} tokens/s")
    elif throughput is not None and throughput.samples_per_s is not None:
        facts.append(f"{format_rate(throughput.samples_per_s)} samples/s")
    if pipeline is not None and pipeline.bubble_fraction is not None:
        facts.append(f"bubble {100 * pipeline.bubble_fraction:.0f} %")
    return facts


def _alarms(snapshot: JobSnapshot, run: Path, width: int) -> list[Text]:
    lines = [Text(line, style="bold red") for alarm in snapshot.alarms for line in _wrap(f"! {alarm}", width)]
    if lines:
        lines.append(Text(f"  why: dtprof diagnose {shlex.quote(str(run))}", overflow="fold"))
    return lines


def _advice(summary: Summary | None, width: int) -> list[Text]:
    """Say which change would gain most, or why none is named."""
    if summary is None or summary.advice is None:
        return []
    return [Text(line, style="cyan") for line in _wrap(f"advice: {advice_words(summary)}", width)]


def _costliest_line(summary: Summary | None, width: int) -> list[Text]:
    """Return the line of the program whose communication costs most."""
    sentence = costliest_line_words(summary) if summary is not None else ""
    return [Text(line, style="cyan") for line in _wrap(f"call site: {sentence}", width)] if sentence else []


def _wrap(alarm: str, width: int) -> list[str]:
    return wrap_text(alarm, width, indent="  ", max_lines=MAX_ALARM_LINES)


def choose_ranks(ranks: Sequence[RankActivity], summary: Summary | None, room: int) -> list[RankActivity]:
    """Return the ranks to show, by number: all, or those that ended badly, block the others, are behind or slow."""
    if len(ranks) <= room:
        return list(ranks)
    slow = {found.rank for found in (summary and summary.stragglers) or ()}
    least = min(rank.step for rank in ranks)

    def order(rank: RankActivity) -> tuple[bool, bool, int, bool, int]:
        return not rank.end.failed, rank.rank not in slow, rank.step - least, rank.blocks, rank.rank

    return sorted(sorted(ranks, key=order)[:room], key=lambda rank: rank.rank)


def _table(ranks: Sequence[RankActivity], summary: Summary | None, width: int) -> Table:
    measured = {rank.rank: rank for rank in summary.ranks} if summary is not None else {}
    rows = [_cells(rank, measured.get(rank.rank)) for rank in ranks]
    shown = _choose_columns(rows, width - LEAST_DOING)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", width=width, pad_edge=False)
    for at in shown:
        table.add_column(_COLUMNS[at], justify="right", no_wrap=True)
    table.add_column("does now", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*(row[at] for at in shown), row[-1])
    return table


def _choose_columns(rows: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Return the columns of numbers that have room, from left to right; always that of the ranks."""
    widths = [1 + max(len(name), *(row[at].cell_len for row in rows)) for at, name in enumerate(_COLUMNS)]
    shown = list(range(len(_COLUMNS)))
    for name in _LEFT_OUT_FIRST:
        if sum(widths[at] for at in shown) > room:
            shown.remove(_COLUMNS.index(name))
    return shown


def _cells(rank: RankActivity, measured: RankResult | None) -> list[Text]:
    doing = rank.doing or ("between phases" if rank.end.is_running else "")
    place = f"  {rank.where}" if rank.where else ""
    partition = measured.partition_ns if measured is not None else None
    style = "" if rank.end.is_running else "red" if rank.end.failed else "dim"
    is_long = rank.since_ns is not None and rank.since_ns >= LONG_NS
    return [
        Text(str(rank.rank)),
        Text(format_count(rank.step)),
        Text(format_ns(measured.step_ns if measured is not None else None)),
        Text(_share(exposed_of(partition), measured)),
        Text(_share((partition or {}).get("exposed_wait"), measured)),
        Text(format_bytes(rank.memory_bytes)),
        Text(f"{rank.since_ns / 1e9:.1f} s" if rank.since_ns is not None else UNKNOWN, style="yellow" * is_long),
        Text(f"{doing}{place}" if rank.end.is_running else rank.end, style=style),
    ]


def _share(spent_ns: float | None, measured: RankResult | None) -> str:
    step_ns = measured.step_ns if measured is not None else None
    return f"{100 * spent_ns / step_ns:.0f} %" if spent_ns is not None and step_ns else UNKNOWN
