"""Gradient buckets that DDP reduces more than once a step: after each backward pass that accumulates gradients.

The reducer counts: what it issues in a step over the number of its buckets. `no_sync()` around all backward passes of a
step but the last leaves one reduction, of the accumulated gradients. Where a step has several optimizer steps (each of
two models its own) or where the quotient is no whole number (models that are trained in turn), nothing is said.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dtprof.analysis.communication.operation_timing import Timing
from dtprof.analysis.placed_ranks import PlacedBatch, PlacedRank, SteppedRank
from dtprof.analysis.results import CallSiteResult, GroupResult, RepeatedReductions
from dtprof.columns import distinct
from dtprof.intervals import Column, Mask
from dtprof.job.api_names import Apis, find_apis
from dtprof.job.axes import purpose_of
from dtprof.records import codes, events
from dtprof.records.rank_log.ddp_buckets import COMPRESSION
from dtprof.records.tables import Array, BucketLayout, RankTables, ids_named

DDP, ALL_REDUCE = "ddp", "all_reduce"
IS_WHOLE = 0.02
"""So far from a whole number reductions a bucket may be: steps at the ends may be cut."""
MIN_SHARE = 0.01
"""Of the step, that the reductions before the last one keep the program."""
_WIDE = [code for name, code in codes.DTYPE_CODES.items() if "float" in name]


class BucketSums(NamedTuple):
    """The bucket reductions of one rank in one group over the measured steps."""

    operations: int
    buckets: int  # of all models together
    nbytes: int
    exposed_ns: int
    optimizer_steps: int


def sum_buckets(
    batch: PlacedBatch, apis: Sequence[Apis], *, chosen: Mask, timing: Timing
) -> list[dict[str, BucketSums]]:
    """Return the bucket reductions of each rank by the name of the group; of ranks without DDP nothing."""
    found: list[dict[str, BucketSums]] = []
    for one, api, begin, end in zip(batch.ranks, apis, batch.bounds, batch.bounds[1:], strict=False):
        tables, operations = one.placed.tables, one.placed.operations
        own: dict[str, BucketSums] = {}
        found.append(own)
        buckets = count_buckets(tables)
        if not buckets:
            continue
        is_bucket = chosen[begin:end] & _are_buckets(tables, operations, api)
        exposed = timing.exposed_transfer[begin:end] + timing.exposed_wait[begin:end]
        for number in distinct(operations["group"][is_bucket]).tolist():
            group = tables.groups.get(number)
            if group is None or not buckets[group.name] or group.size < 2:
                continue
            rows = is_bucket & (operations["group"] == number)
            own[group.name] = BucketSums(
                operations=int(np.count_nonzero(rows)),
                buckets=buckets[group.name],
                nbytes=int(operations["nbytes"][rows].sum()),
                exposed_ns=int(exposed[rows].sum()),
                optimizer_steps=_count_optimizer_steps(one),
            )
    return found


def find_superseded(rank: PlacedRank, rows: Column, step: Column) -> Mask:
    """Say which operations of a rank reduce gradients that it reduces again in the same step.

    Parameters:
        rows: of its operations, in the order of their issue.
        step: in which each of these was issued, a number from 0.
    """
    tables, operations = rank.tables, rank.operations[rows]
    found = np.zeros(len(rows), np.bool_)
    buckets = count_buckets(tables)
    if not buckets or not len(rows):
        return found
    is_bucket = _are_buckets(tables, operations, find_apis(tables, operations))
    steps_of_optimizer = np.searchsorted(operations["issued_ns"], _optimizer_begins(tables, rank.spans))
    for number in distinct(operations["group"][is_bucket]).tolist():
        name = tables.groups[number].name if number in tables.groups else ""
        own = np.flatnonzero(is_bucket & (operations["group"] == number))
        for some in np.split(own, np.flatnonzero(np.diff(step[own])) + 1):
            passes, rest = divmod(len(some), buckets[name]) if buckets[name] else (0, 1)
            is_stepped_between = ((steps_of_optimizer > some[0]) & (steps_of_optimizer <= some[-1])).any()
            if passes > 1 and not rest and not is_stepped_between:
                found[some[: -buckets[name]]] = True
    return found


def count_buckets(tables: RankTables) -> Counter[str]:
    """Return how many buckets the models of a rank have now, by the name of the group that reduces them."""
    buckets = Counter[str]()
    for layout in _newest_layouts(tables):
        buckets[layout.group] += len(layout.sizes)
    return buckets


def _newest_layouts(tables: RankTables) -> Iterable[BucketLayout]:
    """Return the newest layout of each model of a rank."""
    return {layout.reducer: layout for layout in tables.bucket_layouts}.values()


def _are_buckets(tables: RankTables, operations: Array, apis: Apis) -> Mask:
    """Say which operations reduce buckets, by their sizes.

    DDP also reduces maps of used parameters, which are integers, and under Join one number that counts the ranks left.
    """
    if DDP not in apis.names:
        return np.zeros(len(operations), np.bool_)
    is_sum = ids_named(tables.ops, (ALL_REDUCE,))[operations["op"]] & np.isin(operations["dtype"], _WIDE)
    sizes = [size // ratio for each in _newest_layouts(tables) for size in each.sizes for ratio in COMPRESSION]
    of_ddp = apis.of_operation == apis.names.index(DDP)
    return np.asarray(is_sum & of_ddp & np.isin(operations["nbytes"], sizes))


def _optimizer_begins(tables: RankTables, spans: Array) -> Column:
    begins: Column = np.sort(spans["begin_ns"][ids_named(tables.ops, (events.OPTIMIZER,))[spans["op"]]])
    return begins


def _count_optimizer_steps(one: SteppedRank) -> int:
    at = np.searchsorted(_optimizer_begins(one.placed.tables, one.placed.spans), one.windows)
    return int((at[:, 1] - at[:, 0]).sum())


def add_bucket_sums(earlier: Mapping[str, BucketSums], later: Mapping[str, BucketSums]) -> dict[str, BucketSums]:
    """Return the sums of one rank over two stretches of a run; models are those of the later one."""
    added = {**earlier, **later}
    for name in earlier.keys() & later.keys():
        a, b = earlier[name], later[name]
        sums = (x + y for x, y in zip(a, b, strict=True))
        added[name] = BucketSums(*sums)._replace(buckets=b.buckets)
    return added


def find_repeated(
    ranks: Sequence[Mapping[str, BucketSums]],
    groups: Sequence[GroupResult],
    sites: Sequence[CallSiteResult],
    *,
    num_steps: int,
    step_ns: int | None,
) -> tuple[RepeatedReductions, ...]:
    """Return the groups in which gradients are reduced several times a step, the costliest first.

    Parameters:
        ranks: the sums of each rank.
        sites: of the job, the costliest first.
        step_ns: the median.
    """
    if not num_steps or not step_ns:
        return ()
    axes = {group.name: purpose_of(group) or group.name for group in groups}
    found: dict[str, RepeatedReductions] = {}
    for name in dict.fromkeys(name for own in ranks for name in own):
        members = [own[name] for own in ranks if name in own]
        passes = {round(sums.operations / sums.buckets / num_steps) for sums in members}
        (number, *others) = passes
        is_whole = all(abs(sums.operations / sums.buckets / num_steps - number) <= IS_WHOLE for sums in members)
        stepped_once = all(sums.optimizer_steps <= num_steps for sums in members)
        if others or number < 2 or not is_whole or not stepped_once:
            continue
        exposed_ns = sum(sums.exposed_ns for sums in members) // (len(members) * num_steps)
        axis = axes.get(name, name)
        row = RepeatedReductions(
            axis=axis,
            reductions_per_step=number,
            bytes_per_step=sum(sums.nbytes for sums in members) // (len(members) * num_steps),
            exposed_ns_per_step=exposed_ns,
            gain_ns_per_step=exposed_ns * (number - 1) // number,
            line=next((one.line for one in sites if (one.axis, one.op, one.api) == (axis, ALL_REDUCE, DDP)), None),
        )
        known = found.get(axis)
        if row.gain_ns_per_step >= MIN_SHARE * step_ns and (
            known is None or known.gain_ns_per_step < row.gain_ns_per_step
        ):
            found[axis] = row
    return tuple(sorted(found.values(), key=lambda row: (-row.gain_ns_per_step, row.axis)))
