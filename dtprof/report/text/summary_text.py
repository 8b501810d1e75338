"""A summary in under 30 lines of 80 columns.

What finds no room is counted in the line "not shown", which says where it is.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from statistics import median

from dtprof.analysis.caveats import condense_caveats
from dtprof.analysis.communication.axis_collectives import AxisCollectives, collectives_by_axis, name_operations
from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.analysis.results import (
    PARTS,
    CallLine,
    CriticalPathResult,
    PipelineResult,
    RankResult,
    Recovery,
    SmallMessages,
    StragglerResult,
    Summary,
)
from dtprof.analysis.steps.throughput import LOST, RATES, describe_mean_rate
from dtprof.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_fraction,
    format_ns,
    format_rate,
    format_rates,
    format_table,
    format_times,
    join_lines,
    list_ranks,
    plural,
    shorten,
)
from dtprof.job.api_names import CALLS
from dtprof.job.axes import axis_words, purpose_of
from dtprof.records.events import POINT_TO_POINT
from dtprof.report.text.labelled_lines import LABEL, WIDTH, labelled
from dtprof.report.text.memory_text import capacity_lines, memory_lines
from dtprof.report.wording import (
    advice_words,
    clock_words,
    costliest_line_words,
    hot_line_words,
    input_words,
    missing_words,
    reductions_words,
)

MAX_LINES = 29
MAX_RANKS = 8
NUM_ENDS = 3
"""Of more ranks, how many are shown of those that wait least, and of those that wait most."""
MAX_COLLECTIVES = 5
WORTH_IMBALANCE = 1.05
LEAST_GROUP = 8
"""Columns that the name of a group keeps, though the table becomes too wide."""
_PART_NAMES = {"exposed_transfer": "transfer", "exposed_wait": "wait", "checkpoint": "ckpt", "optimizer": "optim"}

MAX_HOT_LINES = 2
_OF_LAYERS = ("tp", "sp", "cp", "ep", "mp")
"""Axes along which each operation is between two computations of a layer."""
_LARGER = {
    "ddp": "buckets of DDP with a larger bucket_cap_mb are fewer",
    "fsdp": "larger modules given to FSDP need fewer",
}
"""What makes fewer, larger operations, by the framework that issues them."""


def summary_text(summary: Summary) -> str:
    """Return the text: the job, its steps and their partition, communication, and the caveats."""
    by_axis = collectives_by_axis(summary)
    body = [
        *_job_lines(summary),
        *_step_lines(summary),
        *_throughput_lines(summary),
        *_advice_lines(summary),
        *_rank_lines(summary),
        *(line for row in summary.hot_lines[:MAX_HOT_LINES] for line in labelled("hot line", hot_line_words(row))),
        *_collective_lines(by_axis[:MAX_COLLECTIVES]),
        *_call_site_lines(summary),
        *_pipeline_lines(summary.pipeline),
        *_small_message_lines(summary.small_messages),
        *(line for row in summary.repeated_reductions[:1] for line in labelled("gradients", reductions_words(row))),
        *_serialised_lines(summary),
        *_exchange_lines(summary),
        *_straggler_lines(summary),
        *(line for row in summary.uneven_input for line in labelled("input", input_words(row))),
        *_path_lines(summary),
        *memory_lines(summary),
    ]
    quality = _quality_lines(summary)
    following = [f"{'next':<{LABEL}}{_next_command(summary)}"]  # never wrapped: it is there to be copied
    room = MAX_LINES - sum(map(len, (body, quality, following))) - 1  # the line of what is not shown
    hidden = [plural(len(by_axis) - MAX_COLLECTIVES, "operation")] if len(by_axis) > MAX_COLLECTIVES else []
    said = " ".join(" ".join(body).split())
    caveats = [caveat for caveat in condense_caveats(summary.cannot_tell) if caveat.reason not in said]
    # What weighs most is never dropped; then figures go before further caveats.
    caveat_lines = [line for caveat in caveats[:1] for line in labelled("caveat", caveat)]
    room -= len(caveat_lines)
    for name, lines in capacity_lines(summary).items():
        if len(lines) <= room:
            body, room = [*body, *lines], room - len(lines)
        else:
            hidden.append(name)
    for shown, caveat in enumerate(caveats[1:], start=1):
        lines = labelled("caveat", caveat)
        if len(lines) > room:
            hidden.append(plural(len(caveats) - shown, "caveat"))
            break
        caveat_lines, room = [*caveat_lines, *lines], room - len(lines)
    if hidden:
        following = [*labelled("not shown", f"{', '.join(hidden)}: see --json or the report"), *following]
    return join_lines([*body, *quality, *caveat_lines, *following])


def _job_lines(summary: Summary) -> list[str]:
    program = [PurePath(part).name for part in summary.command[:1]]  # its folder takes the room of its options
    command = " ".join(map(shlex.quote, (*program, *summary.command[1:]))) or summary.run
    on_hosts = f" on {plural(len(summary.hosts), 'host')}" if summary.hosts else ""  # unknown of some imported runs
    in_replicas = f" in {summary.replicas} replicas" if summary.replicas > 1 else ""
    parts = [f"{plural(summary.world_size, 'rank')}{in_replicas}{on_hosts}"]
    parts += [summary.backend] if summary.backend else []
    parts += [f"torch {summary.torch}"] if summary.torch else []
    parts += [f"{format_ns(summary.wall_ns)} recorded"] if summary.wall_ns else []
    lines = [*labelled("job", shorten(command, WIDTH - LABEL)), *labelled("", ", ".join(parts))]
    state = "complete" if summary.complete else "incomplete"
    if missing_words(summary):
        state += f": {missing_words(summary)}"
    hook = f", {summary.hook} hook" if summary.hook else ""
    lines += labelled("records", f"{plural(summary.events, 'event')}{hook}, {state}")
    if exits := _exits(summary.ranks):
        lines += labelled("ended", exits)
    if summary.recoveries:
        lines += labelled("recovery", _recovered(summary.recoveries))
    return lines


def _recovered(recoveries: Sequence[Recovery]) -> str:
    """Return how much time restarts took."""
    known = [recovery.lost_ns for recovery in recoveries if recovery.lost_ns is not None]
    who = {recovery.replica for recovery in recoveries}
    what = "the job" if who == {None} else f"replica {next(iter(who))}" if len(who) == 1 else f"{len(who)} replicas"
    text = f"{what} restarted {plural(len(recoveries), 'time')}"
    if known:
        text += f": {format_ns(sum(known))} from the last record before to the first step after"
    lacking = len(recoveries) - len(known)
    return text + (f"; of {lacking} not known" if lacking else "")


def _exits(ranks: Sequence[RankResult]) -> str:
    """Return how ranks ended, those of the rarest exit first, where not all finished."""
    by_exit: dict[RankEnd, list[int]] = {}
    for rank in ranks:
        by_exit.setdefault(rank.ended, []).append(rank.rank)
    if all(end.state == EndState.FINISHED for end in by_exit):
        return ""
    rarest = sorted(by_exit.items(), key=lambda item: len(item[1]))
    return "; ".join(
        f"{f'rank {exited[0]}' if len(exited) == 1 else f'{len(exited)} ranks'} {end.words}" for end, exited in rarest
    )


def _step_lines(summary: Summary) -> list[str]:
    steps = summary.steps
    if steps.used is None or steps.duration_ns is None:
        return labelled("steps", f"{steps.count} completed on every rank; none has both a recorded start and end")
    first, last = steps.used
    spread = steps.duration_ns
    text = f"{steps.count}, figures from {first}"
    if first == last:  # one has no spread
        text += f" alone: {format_ns(spread.median)}"
    else:
        text += (
            f" to {last}: median {format_ns(spread.median)} (p10 {format_ns(spread.p10)}, p90 {format_ns(spread.p90)})"
        )
    lines = labelled("steps", text)
    return lines + labelled("times", clock_words(summary)) if summary.device.ranks else lines


def _advice_lines(summary: Summary) -> list[str]:
    if summary.advice is None or summary.steps.used is None:
        return []
    return labelled("advice", advice_words(summary))


def _throughput_lines(summary: Summary) -> list[str]:
    throughput = summary.throughput
    if throughput is None:
        why = next((reason for name in RATES for reason in summary.reasons(name)), "")
        return labelled("throughput", f"not known: {why}") if why.startswith(LOST.partition("{")[0]) else []
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
    return labelled("throughput", "; ".join(filter(None, [*shown, describe_mean_rate(throughput)])))


def _rank_lines(summary: Summary) -> list[str]:
    measured = [rank for rank in summary.ranks if rank.step_ns is not None and rank.partition_ns is not None]
    if not measured:
        return []
    columns = [part for part in PARTS if any(_is_worth_a_column(rank, part) for rank in measured)]
    ranks = _rows_to_show(measured)
    names = [f"rank {rank.rank}" for rank in ranks]
    times = [_values(rank, columns) for rank in ranks]
    if len(measured) > MAX_RANKS:
        names.append(f"median of {format_count(len(measured))}")
        times.append(
            [_median_if_known(column) for column in zip(*(_values(rank, columns) for rank in measured), strict=True)]
        )
    # Each column has its own unit: beside a step in ms, data loading may take us.
    units, numbers = zip(*map(format_times, zip(*times, strict=True)), strict=True)
    rows = [["per step", "step", *(_PART_NAMES.get(part, part) for part in columns)], ["", *units]]
    rows += [[name, *row] for name, row in zip(names, zip(*numbers, strict=True), strict=True)]
    table = format_table([*rows, ["share", *share_cells(summary, columns)]])
    if len(ranks) == len(measured):
        return table
    least, most = (", ".join(str(rank.rank) for rank in some) for some in (ranks[:NUM_ENDS], ranks[-NUM_ENDS:]))
    return [*labelled("ranks", f"{least} wait least for others; {most} wait most"), *table]


def share_cells(summary: Summary, columns: Sequence[str]) -> list[str]:
    """Return the shares of the parts in the steps of all ranks, the step itself before them."""
    shares = summary.part_shares or dict.fromkeys(columns, 0.0)
    return ["100 %", *(UNKNOWN if (share := shares[part]) is None else _percent(share) for part in columns)]


def _percent(fraction: float) -> str:
    """Return a share with up to three significant digits: 97.2 %, 7.49 %, 0.06 %."""
    return f"{100 * fraction:.2f} %" if fraction < 0.09995 else format_fraction(fraction)


def _rows_to_show(ranks: list[RankResult]) -> list[RankResult]:
    """Return all ranks, or of many those that wait least and most for others."""
    if len(ranks) <= MAX_RANKS:
        return ranks
    by_wait = sorted(ranks, key=lambda rank: (rank.partition_ns or {})["exposed_wait"] or 0)
    return [*by_wait[:NUM_ENDS], *by_wait[-NUM_ENDS:]]


def _values(rank: RankResult, columns: list[str]) -> Sequence[float | None]:
    partition = rank.partition_ns or {}
    return [rank.step_ns or 0, *(partition[part] for part in columns)]


def _is_worth_a_column(rank: RankResult, part: str) -> bool:
    spent = (rank.partition_ns or {})[part]
    return spent is None or (rank.step_ns is not None and spent >= 0.0005 * rank.step_ns > 0)


def _median_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _collective_lines(shown: Sequence[AxisCollectives]) -> list[str]:
    if not shown:
        return []
    unit, bandwidths = format_rates([row.busbw_gb_per_s for row in shown])
    rows = [["per operation", "groups", "ops", "bytes", "time", "wait", "blocked", "overlap", unit]]
    rows += [_collective_cells(row, rate) for row, rate in zip(shown, bandwidths, strict=True)]
    excess = max(map(len, format_table(rows, left=2, gap=" "))) - WIDTH
    if excess > 0:
        widest = max(max(len(row[1]) for row in rows) - excess, LEAST_GROUP)
        rows = [[row[0], shorten(row[1], widest), *row[2:]] for row in rows]
    return format_table(rows, left=2, gap=" ")


def _collective_cells(row: AxisCollectives, bandwidth: str) -> list[str]:
    return [
        operation_name(row),
        group_words(row),
        format_count(row.count),
        format_bytes(row.bytes),
        format_ns(row.duration_ns),
        format_ns(row.wait_ns),
        format_ns(row.exposed_ns),
        UNKNOWN if row.overlap is None else f"{100 * row.overlap:.0f} %",
        bandwidth,
    ]


def group_words(row: AxisCollectives) -> str:
    """Return how many groups of which axis a row sums, 64 tp; of one group its name alone."""
    name = axis_words(row.axis)
    return name if row.groups == 1 else f"{row.groups} {name}"


def operation_name(row: AxisCollectives) -> str:
    """Return the operation with the component that issued it, where that says more."""
    if row.api is None or row.api in row.op:
        return row.op
    if row.op in POINT_TO_POINT and row.op in row.api:  # a batch issues both: its name tells them not apart
        return row.op
    return row.api if row.op in row.api else f"{row.op} ({row.api})"


def _call_site_lines(summary: Summary) -> list[str]:
    sentence = costliest_line_words(summary)
    return labelled("call site", sentence) if sentence else []


def _pipeline_lines(pipeline: PipelineResult | None) -> list[str]:
    if pipeline is None:
        return []
    theory = "" if pipeline.theory_fraction is None else f" (theory {format_fraction(pipeline.theory_fraction)})"
    whose = "written by hand, inferred: " if pipeline.inferred else ""
    text = (
        f"{whose}{pipeline.schedule}, {plural(pipeline.stages, 'stage')} on {plural(pipeline.ranks, 'rank')}, "
        f"{plural(pipeline.microbatches, 'microbatch')}: "
        f"bubble {format_fraction(pipeline.bubble_fraction)} of its window{theory}"
    )
    if pipeline.parts is not None:
        text += f": {_shares({name.replace('_', ' '): part for name, part in pipeline.parts.items()})}"
    if pipeline.by_time:
        text += f"; {_shares({name.replace('_', '-'): part for name, part in pipeline.by_time.items()})}"
    lines = labelled("pipeline", text)
    return lines + labelled("", f"smaller with {pipeline.advice}") if pipeline.advice else lines


def _shares(parts: Mapping[str, float]) -> str:
    """Return `schedule 20.0, imbalance 0.9 %`."""
    return ", ".join(f"{name} {100 * part:.1f}" for name, part in parts.items()) + " %"


def _straggler_lines(summary: Summary) -> list[str]:
    if summary.stragglers is None:
        why = "".join(f": {reason}" for reason in summary.reasons("stragglers")[:1])
        return labelled("stragglers", f"not known{why}") if summary.steps.used and summary.collectives else []
    if not summary.stragglers:
        return labelled("stragglers", "none: no rank is late in most steps") if summary.collectives else []
    lines = labelled("stragglers", _straggler(summary.stragglers[0], summary.world_size))
    if len(summary.stragglers) > 1:
        others = list_ranks(straggler.rank for straggler in summary.stragglers[1:])
        last = summary.stragglers[-1]
        gain = ""
        if last.together_ns_per_step is not None and last.slowdown_together is not None:
            gain = f"; if all were like the rest, a step would take {format_ns(last.together_ns_per_step)} less "
            gain += f"({last.slowdown_together:.2f}x)"
        lines += labelled("", f"also {others}{gain}")
    return lines


def _straggler(straggler: StragglerResult, world_size: int) -> str:
    cost = f", {waiting_words(straggler, world_size)}" if straggler.blame_ns_per_step is not None else ""
    slowdown = f", slowdown {straggler.slowdown:.2f}x" if straggler.slowdown else ""
    if slowdown and (replayed := straggler.replayed_slowdown):
        slowdown += " (replayed {:.2f}x, {:.2f}x to {:.2f}x)".format(*replayed)
    where = f", slow {straggler.phase_words}" if straggler.phase else ""
    since = f" since step {straggler.since_step}" if straggler.since_step is not None else ""
    cause = f": {straggler.cause}" if straggler.cause else ""
    cause += f"; sampled {straggler.sampled.words}" if straggler.sampled else ""
    share = f"to blame in {format_fraction(straggler.last_share, 0)} of steps with waits"
    return f"rank {straggler.rank}: {share}{cost}{slowdown}{where}{since if where else ''}{cause}"


def waiting_words(straggler: StragglerResult, world_size: int) -> str:
    """Return how long all other ranks, added up, wait for a straggler in a step."""
    waiting = "the other rank waits" if world_size == 2 else "the others together wait"
    return f"{waiting} {format_ns(straggler.blame_ns_per_step)} a step for it"


def _path_lines(summary: Summary) -> list[str]:
    """Return the largest pieces of the critical path and the rank most on it."""
    path = summary.critical_path
    if path is None or path.step_ns <= 0 or (len(path.ranks) < 2 and not path.transfer_ns):
        return []
    pieces = [(ns, phase.replace("_", " "), "") for phase, ns in path.phases_ns.items()]
    pieces = sorted(pieces + _path_transfers(path, summary), reverse=True)[:4]
    alike = Counter(name for _, name, _ in pieces)
    shown = [f"{name} over {axis}" if axis and alike[name] > 1 else name for ns, name, axis in pieces if ns]
    shown = [f"{name} {format_fraction(ns / path.step_ns, 0)}" for (ns, *_), name in zip(pieces, shown, strict=False)]
    first = path.ranks[0] if path.ranks else None
    most = f"; work of rank {first.rank}: {format_fraction(first.work_ns / path.step_ns, 0)}" if first else ""
    while len(shown) > 1 and len(", ".join(shown) + most) > WIDTH - LABEL:
        shown.pop()
    return labelled("crit. path", ", ".join(shown) + most)


def _path_transfers(path: CriticalPathResult, summary: Summary) -> list[tuple[int, str, str]]:
    """Return the transfers on the critical path by operation and axis."""
    purposes = {group.name: axis_words(purpose_of(group)) or f"group {group.name}" for group in summary.groups}
    named = name_operations(summary, purposes)
    transfers: Counter[tuple[str, str]] = Counter()
    for operation in path.operations:
        of_group = purposes.get(operation.group, f"group {operation.group}")
        transfers[operation.op, named.get((operation.group, operation.op), of_group)] += operation.transfer_ns
    return [(ns, *called) for called, ns in transfers.items()]


def _small_message_lines(rows: Sequence[SmallMessages]) -> list[str]:
    if not rows:
        return []
    worst = rows[0]
    text = (
        f"{_format_rate(worst.count_per_step)} {worst.op} of {format_bytes(worst.bytes)} a step over "
        f"{axis_words(worst.axis)} block the program for {format_ns(worst.exposed_ns_per_step)}: {_joined(worst)}"
    )
    more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    return labelled("messages", text + more + _issued_at(worst.line))


def _format_rate(count_per_step: float) -> str:
    """Return how many there are a step; of less than one, the share."""
    return f"{count_per_step:.0f}" if count_per_step >= 1 else f"{count_per_step:.2g}"


def _joined(row: SmallMessages) -> str:
    """Return what to change: the program issues the operations, or the layers of the axis or a framework need them."""
    if row.axis in _OF_LAYERS:
        return f"each layer needs its own; a larger batch a rank, or fewer ranks along {row.axis}, carries more in each"
    if row.api is None or row.api in CALLS:
        return "merge them"
    return _LARGER.get(row.api, f"{row.api} issues them; its options may make fewer, larger ones")


def _issued_together(api: str | None) -> str:
    """Return what to change: in the program where that issues the operations, else in the package that does."""
    return "issued together (async_op, coalesced)" if api is None or api in CALLS else f"{api} issued them together"


def _serialised_lines(summary: Summary) -> list[str]:
    """Return the worst row of collectives waited for one by one that is not reported as small messages."""
    reported = {(row.axis, row.op, row.api) for row in summary.small_messages}
    serialised = [row for row in summary.serialised if (row.axis, row.op, row.api) not in reported]
    if not serialised:
        return []
    worst = serialised[0]
    rare = worst.rows_per_step < 1
    count, often = (
        (worst.count_per_step / worst.rows_per_step, f"in {format_fraction(worst.rows_per_step)} of the steps")
        if rare
        else (worst.count_per_step, "a step")
    )
    text = (
        f"{_format_rate(count)} {worst.op} of {format_bytes(worst.bytes)} {often} over "
        f"{axis_words(worst.axis)} run one after another: a step takes up to "
        f"{format_ns(worst.gain_ns_per_step)} less if {_issued_together(worst.api)}"
    )
    return labelled("serialised", text + _issued_at(worst.line))


def _issued_at(line: CallLine | None) -> str:
    return f"; {line.words}" if line else ""


def _exchange_lines(summary: Summary) -> list[str]:
    """Return the most uneven exchanges; nothing where they are as good as even."""
    worst = summary.exchanges[0] if summary.exchanges else None
    if worst is None or worst.imbalance < WORTH_IMBALANCE:
        return []
    text = (
        f"over {axis_words(worst.axis or worst.group)}, the busiest rank of an all_to_all has "
        f"{worst.imbalance:.2f}x the mean bytes; rank {worst.busiest_rank} has "
        f"{format_fraction(worst.busiest_share)} of the bytes of all {worst.count}"
    )
    return labelled("exchanges", text)


def _quality_lines(summary: Summary) -> list[str]:
    overhead = summary.overhead
    clock = "not known" if summary.time_error_ns is None else format_ns(summary.time_error_ns)
    share = f" ({100 * overhead.share_of_step:.2f} % of a step)" if overhead.share_of_step is not None else ""
    per_event = overhead.capture_ns_per_event
    text = f"{format_ns(per_event)} per event{share}" if per_event is not None else "not known"
    return labelled("overhead", f"{text}; dropped {format_count(summary.dropped_events)}; clock error {clock}")


def _next_command(summary: Summary) -> str:
    failed = summary.missing_ranks or any(rank.ended.failed for rank in summary.ranks)
    command = "diagnose" if failed else "report"
    return f"dtprof {command} {shlex.quote(summary.run)}"
