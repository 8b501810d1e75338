"""A summary in under 30 lines of 80 columns."""

import shlex
from collections.abc import Sequence
from statistics import median

from dtprof.analysis.caveats import tell_shortly
from dtprof.analysis.results import (
    PARTS,
    CollectiveResult,
    CriticalPathResult,
    PipelineResult,
    RankResult,
    SmallMessages,
    StragglerResult,
    Summary,
    Throughput,
)
from dtprof.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_fraction,
    format_ns,
    format_rate,
    format_table,
    join_lines,
    shorten,
)
from dtprof.job.sound_records import list_ranks
from dtprof.report.text.labelled_lines import LABEL, WIDTH, labelled
from dtprof.report.text.memory_text import capacity_lines, memory_lines

MAX_LINES = 29
MAX_RANKS = 8
MAX_COLLECTIVES = 5
_PART_NAMES = {"exposed_transfer": "transfer", "exposed_wait": "wait", "checkpoint": "ckpt", "optimizer": "optim"}
_TABLE_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def summary_text(summary: Summary) -> str:
    """Return the text: the job, its steps, where they go, what was communicated, how far to trust all this."""
    head = [*_job_lines(summary), *_step_lines(summary), *_throughput_lines(summary.throughput)]
    tables = [*_rank_lines(summary), *_collective_lines(summary.collectives)]
    tail = [
        *_pipeline_lines(summary.pipeline),
        *_small_message_lines(summary.small_messages),
        *_serialised_lines(summary),
        *_straggler_lines(summary),
        *_path_lines(summary.critical_path),
        *memory_lines(summary),
    ]
    quality = _quality_lines(summary)
    following = [f"{'next':<{LABEL}}{_next_command(summary)}"]  # never cut: it is there to be copied
    room = MAX_LINES - sum(map(len, (head, tables, tail, quality, following)))
    capacity = capacity_lines(summary)
    if len(capacity) < room:
        tail, room = [*tail, *capacity], room - len(capacity)
    return join_lines(
        [*head, *tables, *tail, *quality, *_caveat_lines(tell_shortly(summary.cannot_tell), room), *following]
    )


def _job_lines(summary: Summary) -> list[str]:
    command = " ".join(map(shlex.quote, summary.command)) or summary.run
    hosts = f"{len(summary.hosts)} host{'s' if len(summary.hosts) != 1 else ''}"
    on_hosts = f" on {hosts}" if summary.hosts else ""  # not known of some imported runs
    parts = [f"{summary.world_size} rank{'s' if summary.world_size != 1 else ''}{on_hosts}"]
    parts += [summary.backend] if summary.backend else []
    parts += [f"torch {summary.torch}"] if summary.torch else []
    parts += [f"{format_ns(summary.wall_ns)} recorded"] if summary.wall_ns else []
    lines = [*labelled("job", shorten(command, WIDTH - LABEL)), *labelled("", ", ".join(parts))]
    state = "complete" if summary.complete else "incomplete"
    if summary.missing_words:
        state += f": {summary.missing_words}"
    hook = f", {summary.hook} hook" if summary.hook else ""
    lines += labelled("records", f"{format_count(summary.events)} events{hook}, {state}")
    if endings := _endings(summary.ranks):
        lines += labelled("ended", endings)
    return lines


def _endings(ranks: Sequence[RankResult]) -> str:
    """Return how ranks ended, where not all finished."""
    by_ending: dict[str, list[int]] = {}
    for rank in ranks:
        by_ending.setdefault(rank.ended, []).append(rank.rank)
    if set(by_ending) <= {"finished"}:
        return ""
    rarest = sorted(by_ending.items(), key=lambda item: len(item[1]))
    return "; ".join(
        f"rank {ended[0]} {how}" if len(ended) == 1 else f"{len(ended)} ranks {how}" for how, ended in rarest
    )


def _step_lines(summary: Summary) -> list[str]:
    steps = summary.steps
    if steps.used is None or steps.duration_ns is None:
        return labelled("steps", f"{steps.count} ended on every rank; none has both a begin and an end to measure")
    first, last = steps.used
    spread = steps.duration_ns
    return labelled(
        "steps",
        f"{steps.count}, figures from {first} to {last}: median {format_ns(spread.median)}"
        f" (p10 {format_ns(spread.p10)}, p90 {format_ns(spread.p90)})",
    )


def _throughput_lines(throughput: Throughput | None) -> list[str]:
    if throughput is None:
        return []
    rates = (
        (throughput.tokens_per_s, throughput.tokens_per_step, "tokens"),
        (throughput.samples_per_s, throughput.samples_per_step, "samples"),
    )
    shown = [
        f"{format_rate(rate)} {what}/s"
        + (f", {count:,.0f} a step" if what == "tokens" or throughput.tokens_per_s is None else "")
        for rate, count, what in rates
        if rate is not None
    ]
    return labelled("throughput", "; ".join(shown))


def _rank_lines(summary: Summary) -> list[str]:
    measured = [rank for rank in summary.ranks if rank.step_ns is not None and rank.partition_ns is not None]
    if not measured:
        return []
    divisor, unit = _table_unit(max(rank.step_ns or 0 for rank in measured))
    columns = [part for part in PARTS if any(_is_worth_a_column(rank, part) for rank in measured)]
    rows = [[f"{unit}/step", "step", *(_PART_NAMES.get(part, part) for part in columns)]]
    for name, rank in _rows_to_show(measured):
        rows.append([name, *(_number(value, divisor) for value in _values(rank, columns))])
    if len(measured) > MAX_RANKS:
        middle = [_median(column) for column in zip(*(_values(rank, columns) for rank in measured), strict=True)]
        rows.append([f"median of {len(measured)}", *(_number(value, divisor) for value in middle)])
    return format_table([*rows, ["share", *share_cells(summary, columns)]])


def share_cells(summary: Summary, columns: Sequence[str]) -> list[str]:
    """Return what the parts have of the steps of all ranks, the step itself before them."""
    shares = summary.part_shares or dict.fromkeys(columns, 0.0)
    return ["100 %", *(UNKNOWN if (own := shares[part]) is None else format_fraction(own) for part in columns)]


def _rows_to_show(ranks: list[RankResult]) -> list[tuple[str, RankResult]]:
    """Return all ranks, or of many those that wait least and most for others."""
    if len(ranks) <= MAX_RANKS:
        return [(f"rank {rank.rank}", rank) for rank in ranks]
    by_wait = sorted(ranks, key=lambda rank: (rank.partition_ns or {})["exposed_wait"] or 0)
    return [(f"rank {rank.rank}", rank) for rank in (*by_wait[:3], *by_wait[-3:])]


def _values(rank: RankResult, columns: list[str]) -> list[int | None]:
    partition = rank.partition_ns or {}
    return [rank.step_ns or 0, *(partition[part] for part in columns)]


def _is_worth_a_column(rank: RankResult, part: str) -> bool:
    spent = (rank.partition_ns or {})[part]
    return spent is None or (rank.step_ns is not None and spent >= 0.0005 * rank.step_ns > 0)


def _median(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _table_unit(largest: int) -> tuple[int, str]:
    return next((row for row in _TABLE_UNITS if largest >= row[0]), _TABLE_UNITS[-1])


def _number(value: float | None, divisor: int) -> str:
    if value is None:
        return UNKNOWN
    return f"{value / divisor:,.1f}" if value < 1000 * divisor else f"{value / divisor:,.0f}"


def _collective_lines(collectives: Sequence[CollectiveResult]) -> list[str]:
    if not collectives:
        return []
    rows = [["collective", "group", "count", "bytes", "time", "wait", "exposed", "overlap", "GB/s"]]
    rows += [_collective_cells(row) for row in collectives[:MAX_COLLECTIVES]]
    excess = max(map(len, format_table(rows, left=2, gap=" "))) - WIDTH
    if excess > 0:
        widest = max(len(row[0]) for row in rows) - excess
        rows = [[shorten(row[0], widest), *row[1:]] for row in rows]
    lines = format_table(rows, left=2, gap=" ")
    more = len(collectives) - MAX_COLLECTIVES
    return [*lines, f"{more} more kind{'s' if more != 1 else ''} of operations: --json"] if more > 0 else lines


def _collective_cells(row: CollectiveResult) -> list[str]:
    return [
        _operation_name(row),
        shorten(row.group, 8),
        str(row.count),
        format_bytes(row.bytes),
        format_ns(row.duration_ns),
        format_ns(row.wait_ns),
        format_ns(row.exposed_ns),
        UNKNOWN if row.overlap is None else f"{100 * row.overlap:.0f} %",
        _bandwidth(row.busbw_gb_per_s),
    ]


def _operation_name(row: CollectiveResult) -> str:
    """Return the operation with what the user called, where that says more."""
    if row.api is None or row.api in row.op:
        return row.op
    return row.api if row.op in row.api else f"{row.op} ({row.api})"


def _bandwidth(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return UNKNOWN
    return "<0.01" if gb_per_s < 0.01 else f"{gb_per_s:.2f}"


def _pipeline_lines(pipeline: PipelineResult | None) -> list[str]:
    if pipeline is None:
        return []
    theory = "" if pipeline.theory_fraction is None else f" (theory {pipeline.theory_fraction:.1%})"
    text = (
        f"{pipeline.schedule}, {pipeline.stages} stages on {pipeline.ranks} ranks, "
        f"{pipeline.microbatches} microbatches: bubble {pipeline.bubble_fraction:.1%}{theory}"
    )
    if pipeline.parts is not None:
        text += ": " + ", ".join(f"{name.replace('_', ' ')} {part:.1%}" for name, part in pipeline.parts.items())
    if pipeline.by_time:
        text += "; in " + ", ".join(f"{name.replace('_', '-')} {part:.1%}" for name, part in pipeline.by_time.items())
    lines = labelled("pipeline", text, max_lines=4)
    return lines + labelled("", f"smaller with {pipeline.advice}", max_lines=2) if pipeline.advice else lines


def _straggler_lines(summary: Summary) -> list[str]:
    if not summary.stragglers:
        return labelled("stragglers", "none found") if summary.steps.used and summary.collectives else []
    lines = labelled("stragglers", _straggler(summary.stragglers[0]), max_lines=2)
    if len(summary.stragglers) > 1:
        others = list_ranks(straggler.rank for straggler in summary.stragglers[1:])
        last = summary.stragglers[-1]
        gain = ""
        if last.together_ns_per_step is not None and last.slowdown_together is not None:
            gain = f"; if all were like the rest, a step would take {format_ns(last.together_ns_per_step)} less "
            gain += f"({last.slowdown_together:.2f}x)"
        lines += labelled("", f"also {others}{gain}", max_lines=2)
    return lines


def _straggler(straggler: StragglerResult) -> str:
    blame = straggler.blame_ns_per_step
    cost = f", the others wait {format_ns(blame)} a step for it" if blame is not None else ""
    slowdown = f" ({straggler.slowdown:.2f}x)" if straggler.slowdown else ""
    where = f", slow {straggler.phase_words}" if straggler.phase else ""
    since = f" since step {straggler.since_step}" if straggler.since_step is not None else ""
    cause = f": {straggler.cause}" if straggler.cause else ""
    share = f"to blame in {straggler.last_share:.0%}"
    text = f"rank {straggler.rank}: {share}{cost}{slowdown}{where}{since if where else ''}"
    return text + cause if len(text + cause) <= 2 * (WIDTH - LABEL) - 10 else text


def _path_lines(path: CriticalPathResult | None) -> list[str]:
    """Return the largest pieces of the critical path and the rank most on it."""
    if path is None or path.step_ns <= 0 or (len(path.ranks) < 2 and not path.transfer_ns):
        return []
    pieces = [(ns, phase.replace("_", " ")) for phase, ns in path.phases_ns.items()]
    pieces += [(one.transfer_ns, one.op) for one in path.operations]
    shown = [f"{name} {ns / path.step_ns:.0%}" for ns, name in sorted(pieces, reverse=True)[:4] if ns]
    most = f"; work of rank {path.ranks[0].rank} {path.ranks[0].work_ns / path.step_ns:.0%}" if path.ranks else ""
    while len(shown) > 1 and len(", ".join(shown) + most) > WIDTH - LABEL:
        shown.pop()
    return labelled("crit. path", ", ".join(shown) + most)


def _small_message_lines(found: Sequence[SmallMessages]) -> list[str]:
    if not found:
        return []
    worst = found[0]
    text = (
        f"{worst.count_per_step:.0f} {worst.op} of {format_bytes(worst.bytes)} a step over {worst.axis} keep the "
        f"program for {format_ns(worst.exposed_ns_per_step)}: join them"
    )
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return labelled("messages", text + more, max_lines=2)


def _serialised_lines(summary: Summary) -> list[str]:
    """Return the worst row of collectives waited for one by one that is not told of as small messages."""
    told = {(row.axis, row.op, row.api) for row in summary.small_messages}
    found = [row for row in summary.serialised if (row.axis, row.op, row.api) not in told]
    if not found:
        return []
    worst = found[0]
    text = (
        f"{worst.count_per_step:.0f} {worst.op} of {format_bytes(worst.bytes)} a step over {worst.axis} wait one for "
        f"another: up to {format_ns(worst.gain_ns_per_step)} less if issued together (async_op, coalesced)"
    )
    return labelled("serialised", text, max_lines=2)


def _quality_lines(summary: Summary) -> list[str]:
    overhead = summary.overhead
    clock = "not known" if summary.clock_error_ns is None else format_ns(summary.clock_error_ns)
    share = f" ({100 * overhead.share_of_step:.2f} % of a step)" if overhead.share_of_step is not None else ""
    text = f"{format_ns(overhead.capture_ns_per_event)} an event{share}"
    return labelled("own cost", f"{text}; dropped {format_count(summary.dropped_events)}; clock error {clock}")


def _caveat_lines(caveats: Sequence[str], room: int) -> list[str]:
    lines: list[str] = []
    for shown, caveat in enumerate(caveats):
        more = labelled("cannot tell" if not shown else "", caveat, max_lines=2)
        is_last = shown == len(caveats) - 1
        if len(lines) + len(more) + (0 if is_last else 1) > room:
            if not lines:  # what weighs most is never left out whole
                return labelled("cannot tell", f"{len(caveats)} things (--json): {caveat}")
            return [*lines, *labelled("", f"{len(caveats) - shown} more: --json")]
        lines += more
    return lines


def _next_command(summary: Summary) -> str:
    ended_well = {rank.ended for rank in summary.ranks} <= {"finished", "running", "unknown"}
    command = "report" if ended_well and not summary.missing_ranks else "diagnose"
    return f"dtprof {command} {shlex.quote(summary.run)}"
