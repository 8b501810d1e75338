"""Communication by call site, phase and size: one sum for each of these together, from which the tables follow.

An operation belongs to the phase in which its rank issued it, to none where a thread beside the steps did, and to the
line of the program that issued it; DDP's bucket reductions, which threads of autograd issue, belong to the line of the
backward pass that runs.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from dtprof.analysis.communication.bus_bandwidth import bus_factor, total_bytes
from dtprof.analysis.communication.operation_timing import Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch
from dtprof.analysis.results import PHASES, CallLine, CallSiteResult, MessageSizes, PhaseCommunication, Summary
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.columns import number_distinct
from dtprof.intervals import Column, Mask, locate
from dtprof.job.api_names import Apis
from dtprof.job.axes import purpose_of_operation
from dtprof.job.valid_records import UNNAMED
from dtprof.records.codes import NONE
from dtprof.records.tables import UNKNOWN_NS

MAX_SITES = 256
"""Call sites listed."""
OTHER = "other"
"""The phase of an operation that was issued in none."""
UNSIZED = -1
"""The size class of operations whose size is not known."""
WORTH = 0.01
"""Of the median step: a line that costs less is not named."""

Key = TypeVar("Key", bound=Hashable)


class SiteKey(NamedTuple):
    """Operations of one group and api that one line issues in one phase, of 2 ** (size - 1) to 2 ** size - 1 bytes."""

    line: CallLine | None  # None: no line of the program is known
    phase: str
    axis: str  # of the group, else its description or name
    group_size: int
    op: str
    api: str
    size: int  # number of binary digits of the bytes; 0: of no byte, UNSIZED: not known


COLUMNS = ("records", "sized", "nbytes", "seen", "exposed", "split", "wait", "transfer", "split_nbytes")
"""Sums of a key: counts, ns and bytes, as in ROW_SUMS."""
Sums = Mapping[SiteKey, Column]


def sum_sites(batch: PlacedBatch, apis: Sequence[Apis], *, chosen: Mask, timing: Timing) -> dict[SiteKey, Column]:
    """Sum the chosen operations of ranks by line, phase, group, operation, api and size; all COLUMNS are integers."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return {}
    operations = batch.operations
    nbytes, sized = operations["nbytes"][rows], operations["dtype"][rows] != NONE
    call = (operations["op"][rows].astype(np.int64) << 16 | operations["group"][rows]) << 16
    call |= np.concatenate([api.of_operation for api in apis])[rows]
    codes, places = zip(*map(number_distinct, (operations["site"][rows].astype(np.int64), call, nbytes)), strict=True)
    digits = np.frexp(codes[2].astype(np.float64))[1]
    sizes = np.where(sized, digits[places[2]], UNSIZED) + 1
    numbers = (batch.place[rows], places[0], phases_of_operations(batch, rows), places[1], sizes)
    lengths = (len(batch.ranks), len(codes[0]), len(ORDER) + 1, len(codes[1]), int(sizes.max()) + 1)
    found, position = number_distinct(np.ravel_multi_index(numbers, lengths))
    keys = np.stack(np.unravel_index(found, lengths), axis=1)
    table = np.zeros((len(keys), len(COLUMNS)), np.int64)
    for i, weights in enumerate(_weigh(nbytes, sized, rows, timing, batch)):
        # Sums of ns and bytes of one batch stay far below 2 ** 53, so that float64 holds them exactly.
        table[:, i] = np.rint(np.bincount(position, weights, len(keys)))
    sums: dict[SiteKey, Column] = {}
    for (place, site_number, phase, call_number, size), row in zip(keys.tolist(), table, strict=True):
        site_id, packed = int(codes[0][site_number]), int(codes[1][call_number])
        tables = batch.ranks[place].placed.tables
        op, group, api = packed >> 32, packed >> 16 & 0xFFFF, packed & 0xFFFF
        of_group = tables.groups.get(group)
        api_name = apis[place].names[api]
        key = SiteKey(
            line=CallLine.of(tables.sites.get(site_id)),
            phase=ORDER[phase] if phase < len(ORDER) else OTHER,
            axis=purpose_of_operation(of_group, api_name) or (of_group.name if of_group else ""),
            group_size=of_group.size if of_group else 1,
            op=tables.ops[op] if op < len(tables.ops) else UNNAMED,
            api=api_name,
            size=size - 1,
        )
        sums[key] = sums[key] + row if key in sums else row
    return sums


def phases_of_operations(batch: PlacedBatch, rows: Column) -> Column:
    """Return the position in ORDER of the phase in which each of these operations was issued; len(ORDER): in none."""
    issued, of_steps = batch.place_times(batch.operations["issued_ns"])[rows], batch.blocked.of_steps[rows]
    found = np.full(len(rows), len(ORDER), np.int64)
    for position in reversed(range(len(ORDER))):
        intervals = batch.phases[ORDER[position]]
        if len(intervals):
            found[of_steps & (locate(issued, intervals) >= 0)] = position
    return found


def _weigh(
    nbytes: Column, sized: Mask, rows: Column, timing: Timing, batch: PlacedBatch
) -> Iterable[Column | Mask | None]:
    """Yield what each of COLUMNS sums."""
    duration, wait = timing.duration[rows], timing.wait[rows]
    seen = (duration != UNKNOWN_NS) & batch.blocked.exposure_known[rows]
    split = wait != UNKNOWN_NS
    yield None  # counts
    yield sized
    yield nbytes
    yield seen
    yield np.where(seen, timing.exposed_wait[rows] + timing.exposed_transfer[rows], 0)
    yield split
    yield np.where(split, wait, 0)
    yield np.where(split, duration - wait, 0)
    yield np.where(split, nbytes, 0)


def add_sites(sums: dict[SiteKey, Column], others: Sums) -> None:
    """Add sums of other ranks."""
    for key, row in others.items():
        sums[key] = sums[key] + row if key in sums else row


def _join(sums: Sums, name: Callable[[SiteKey], Key]) -> dict[Key, dict[str, int]]:
    """Sum over all keys that are called alike."""
    joined: dict[Key, Column] = {}
    for key, row in sums.items():
        called = name(key)
        joined[called] = joined[called] + row if called in joined else row
    return {called: dict(zip(COLUMNS, row.tolist(), strict=True)) for called, row in joined.items()}


class _Place(NamedTuple):
    line: CallLine | None
    phase: str
    axis: str
    op: str
    api: str


class _Sized(NamedTuple):
    axis: str
    ranks: int
    op: str
    size: int


def list_sites(sums: Sums, *, num_steps: int, num_ranks: int) -> tuple[CallSiteResult, ...]:
    """Return the MAX_SITES costliest call sites, the most exposed time first; empty without measured steps."""
    share = num_steps * num_ranks
    if not share:
        return ()
    places = _join(sums, lambda key: _Place(*key[:3], key.op, key.api))
    results = [
        CallSiteResult(
            line=place.line,
            phase=place.phase,
            axis=place.axis,
            op=place.op,
            api=place.api or None,
            count_per_step=row["records"] / share,
            bytes=_mean(row["nbytes"], row["sized"]),
            exposed_ns_per_step=_mean(row["exposed"], row["seen"] and share),
            wait_ns_per_step=_mean(row["wait"], row["split"] and share),
            transfer_ns_per_step=_mean(row["transfer"], row["split"] and share),
        )
        for place, row in sorted(places.items(), key=lambda item: (str(item[0].line), *item[0][1:]))
    ]
    results.sort(
        key=lambda one: (-(one.exposed_ns_per_step or 0), -(one.transfer_ns_per_step or 0), -one.count_per_step)
    )
    return tuple(results[:MAX_SITES])


def sum_by_phase(sums: Sums, *, num_steps: int, num_ranks: int) -> tuple[PhaseCommunication, ...]:
    """Return the communication issued in each phase, in the order of PHASES; empty without measured steps."""
    share = num_steps * num_ranks
    if not share:
        return ()
    phases = _join(sums, lambda key: key.phase)
    return tuple(
        PhaseCommunication(
            phase=phase,
            count_per_step=row["records"] / share,
            bytes_per_step=_mean(row["nbytes"], row["sized"] and share),
            exposed_ns_per_step=_mean(row["exposed"], row["seen"] and share),
            wait_ns_per_step=_mean(row["wait"], row["split"] and share),
            transfer_ns_per_step=_mean(row["transfer"], row["split"] and share),
        )
        for phase, row in sorted(phases.items(), key=lambda item: PHASES.index(item[0]))
    )


def list_sizes(sums: Sums, *, num_steps: int, num_ranks: int) -> tuple[MessageSizes, ...]:
    """Return the distribution of the sizes of operations, by axis, operation and power of two, smallest first."""
    share = num_steps * num_ranks
    if not share:
        return ()
    sizes = _join(sums, lambda key: _Sized(key.axis, key.group_size, key.op, key.size))
    results = []
    for sized, row in sorted(sizes.items()):
        if sized.size == UNSIZED or sized.op == "barrier":
            continue
        factor = bus_factor(sized.op, sized.ranks)
        nbytes = total_bytes(sized.op, row["split_nbytes"], sized.ranks)
        algbw = nbytes / row["transfer"] if factor is not None and nbytes and row["transfer"] > 0 else None
        results.append(
            MessageSizes(
                axis=sized.axis,
                ranks=sized.ranks,
                op=sized.op,
                from_bytes=1 << sized.size - 1 if sized.size else 0,
                below_bytes=1 << sized.size,
                count_per_step=row["records"] / share,
                bytes_per_step=row["nbytes"] // share,
                exposed_ns_per_step=_mean(row["exposed"], row["seen"] and share),
                transfer_ns_per_step=_mean(row["transfer"], row["split"] and share),
                algbw_gb_per_s=algbw,
                busbw_gb_per_s=algbw * factor if algbw is not None and factor is not None else None,
            )
        )
    return tuple(results)


def find_costliest_line(summary: Summary) -> tuple[CallSiteResult | None, float]:
    """Return the site of a known line that costs most, and its share of the steps; None where that is below WORTH."""
    lengths = [rank.step_ns for rank in summary.ranks if rank.step_ns]
    worst = next((site for site in summary.call_sites if site.line is not None), None)
    # A mean of the mean step: the median is a small part of it where few steps are far longer than the rest.
    share = (worst.exposed_ns_per_step or 0) * len(lengths) / sum(lengths) if worst is not None and lengths else 0.0
    return (worst, share) if share >= WORTH else (None, 0.0)


def _mean(total: int, number: int) -> int | None:
    return total // number if number else None
