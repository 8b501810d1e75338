"""Gradient buckets that DDP reduces more than once a step: after each backward pass that accumulates gradients.

The reducer counts: what it issues in a step over the number of its buckets. `no_sync()` around all backward passes of a
step but the last leaves one reduction, of the accumulated gradients. Nothing is said of a step in which an optimizer
steps in between (two models have one each) or where the quotient is no whole number (models are trained in turn).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dtprof.analysis.communication.operation_timing import Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch, PlacedRank
from dtprof.analysis.results import CallSiteResult, GroupResult, RepeatedReductions
from dtprof.columns import distinct
from dtprof.intervals import Column, Mask
from dtprof.job.api_names import Apis, find_apis
from dtprof.job.axes import purpose_of
from dtprof.records import codes, events
from dtprof.records.rank_log.ddp_buckets import COMPRESSION
from dtprof.records.tables import Array, BucketLayout, RankTables, ids_named

DDP, ALL_REDUCE = "ddp", "all_reduce"
MIN_SHARE = 0.01
"""Of the step, that the reductions before the last ones keep the program."""
_WIDE = [code for name, code in codes.DTYPE_CODES.items() if "float" in name]


class BucketSums(NamedTuple):
    """The bucket reductions of one rank in one group over the measured steps."""

    operations: int
    buckets: int  # of all models together
    nbytes: int
    exposed_ns: int
    superseded_ns: int  # of that, of reductions of gradients that the rank reduced again in the same step


class _GroupBuckets(NamedTuple):
    """The bucket reductions of one rank in one group."""

    group: str
    buckets: int
    rows: Column
    is_superseded: Mask  # of each row: it reduces gradients that the rank reduces again in the same step


def sum_buckets(
    batch: PlacedBatch, apis: Sequence[Apis], *, step: Column, chosen: Mask, timing: Timing
) -> list[dict[str, BucketSums]]:
    """Return the bucket reductions of each rank by the name of the group; of ranks without DDP nothing.

    Parameters:
        step: of each operation, the number of its step.
    """
    exposed = timing.exposed_transfer + timing.exposed_wait
    found: list[dict[str, BucketSums]] = []
    for rank, api, begin, end in zip(batch.ranks, apis, batch.bounds, batch.bounds[1:], strict=False):
        placed, nbytes, exposed_ns = rank.placed, rank.placed.operations["nbytes"], exposed[begin:end]
        rows = np.flatnonzero(chosen[begin:end])
        found.append(
            {
                group: BucketSums(
                    operations=len(own),
                    buckets=buckets,
                    nbytes=int(nbytes[own].sum()),
                    exposed_ns=int(exposed_ns[own].sum()),
                    superseded_ns=int(exposed_ns[own[is_superseded]].sum()),
                )
                for group, buckets, own, is_superseded in _find_buckets(placed, api, rows, step[begin:end][rows])
            }
        )
    return found


def find_superseded(rank: PlacedRank, rows: Column, step: Column) -> Mask:
    """Say which operations of a rank reduce gradients that it reduces again in the same step.

    Parameters:
        rows: of its operations, in the order of their issue.
        step: in which each of these was issued, a number from 0.
    """
    found = np.zeros(len(rank.operations), np.bool_)
    for _, _, own, is_superseded in _find_buckets(rank, find_apis(rank.tables, rank.operations), rows, step):
        found[own] = is_superseded
    return found[rows]


def _find_buckets(rank: PlacedRank, api: Apis, rows: Column, step: Column) -> Iterator[_GroupBuckets]:
    """Yield the bucket reductions among the rows of a rank by group."""
    tables, operations = rank.tables, rank.operations
    buckets = count_buckets(tables)
    if not buckets or not len(rows):
        return
    is_bucket = _are_buckets(tables, operations, api)[rows]
    # The first operation issued after each step of the optimizer.
    stepped_before = np.searchsorted(operations["issued_ns"][rows], _optimizer_begins(tables, rank.spans))
    group_of = operations["group"][rows]
    for number in distinct(group_of[is_bucket]).tolist():
        group = tables.groups.get(number)
        if group is None or not buckets[group.name] or group.size < 2:
            continue
        size = buckets[group.name]
        own = np.flatnonzero(is_bucket & (group_of == number))
        is_superseded = np.zeros(len(own), np.bool_)
        cuts = [0, *(np.flatnonzero(np.diff(step[own])) + 1).tolist(), len(own)]
        for begin, end in pairwise(cuts):
            passes, rest = divmod(end - begin, size)
            is_stepped_between = ((stepped_before > own[begin]) & (stepped_before <= own[end - 1])).any()
            if passes > 1 and not rest and not is_stepped_between:
                is_superseded[begin : end - size] = True
        yield _GroupBuckets(group.name, size, rows[own], is_superseded)


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
        count = len(members) * num_steps
        gain_ns = sum(sums.superseded_ns for sums in members) // count
        number = round(sum(sums.operations / sums.buckets for sums in members) / count)
        if number < 2 or gain_ns < MIN_SHARE * step_ns:
            continue
        axis = axes.get(name, name)
        row = RepeatedReductions(
            axis=axis,
            reductions_per_step=number,
            bytes_per_step=sum(sums.nbytes for sums in members) // count,
            exposed_ns_per_step=sum(sums.exposed_ns for sums in members) // count,
            gain_ns_per_step=gain_ns,
            line=next((site.line for site in sites if (site.axis, site.op, site.api) == (axis, ALL_REDUCE, DDP)), None),
        )
        known = found.get(axis)
        if known is None or known.gain_ns_per_step < gain_ns:
            found[axis] = row
    return tuple(sorted(found.values(), key=lambda row: (-row.gain_ns_per_step, row.axis)))
