"""The effect of changes on the durations of a graph.

A rank, host or stage that is fixed computes like the others: each phase is scaled to the mean of the ranks that are
not fixed (those of the same stage in other replicas, where there are any). An operation or a phase that is fixed takes
its ideal time, the same on all ranks and in all steps; input, checkpoints and garbage collection are taken off the path
of the step.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.analysis.whatif.replay import Dependencies
from dtprof.analysis.whatif.whatif_changes import (
    COMPUTE,
    HOST,
    LAST,
    NETWORK,
    OFF_THE_PATH,
    OP,
    PHASE,
    RANK,
    RANKS,
    REDUCE_DTYPE,
    STAGE,
    SYNC,
    WITHOUT,
    Fix,
)
from dtprof.columns import distinct, median, number_distinct
from dtprof.errors import UsageError
from dtprof.formatting import list_ranks, plural
from dtprof.intervals import Column, Floats, Mask, cover, intersect, total
from dtprof.job.axes import DEFAULT_GROUP
from dtprof.records import events

ON_DEVICE = (
    events.FORWARD,
    events.BACKWARD,
    events.RECOMPUTE,
    events.EVALUATION,
    events.OPTIMIZER,
)
"""Phases that a faster device shortens; the rest is the host's."""
SMALLEST_BUCKET = 1e-3
"""Of the largest gradient bucket: smaller reductions are of losses and norms."""
MIN_SIZES_RATIO = 4.0
"""Smallest ratio of sizes that separates a latency from a bandwidth."""
DATA_PARALLEL = ("dp_replicate", "dp", "ddp", "fsdp", "dp_shard")
"""Axes that grow with the number of ranks; of several in a run the first."""
WHOLE_JOB = (DEFAULT_GROUP,)
"""The group of all ranks: where no axis divides the model, they are replicas."""
OF_MODEL = ("tp", "pp", "cp", "ep", "sp", "mp")
SLOWED = 0.5
"""By so much at most operations slow down the computation beside them: on a host they take cores, on a device units."""
MAX_GROWTH = 16
"""How many times the measured replicas a prediction may go."""


class Unpredictable(Exception):
    """A change cannot be predicted from this run; the message is a sentence that says why."""


def fix_durations(graph: OperationGraph, fix: Fix, durations: Floats) -> Floats:
    """Return durations after a change that leaves the order of operations as it is.

    Raises:
        UsageError: the run has no such rank, host, stage, operation or phase.
        Unpredictable: the run does not hold what the prediction needs.
    """
    if fix.what in (RANK, HOST, STAGE):
        return _liken(graph, _choose_ranks(graph, fix), durations, fix)
    if fix.what == OP:
        return np.where(_of_operation(graph, fix.value, option=f"--fix {fix}"), graph.ideal, durations)
    if fix.what == PHASE:
        chosen = graph.is_of(lambda kind: not kind.is_communication and kind.name == fix.value)
        if not chosen.any():
            names = [kind.name for kind in graph.kinds if not kind.is_communication]
            raise UsageError(f"--fix {fix}: no rank spent time in it; expected one of {', '.join(names)}")
        return np.where(chosen, 0.0 if fix.value in OFF_THE_PATH else graph.ideal, durations)
    if fix.what in (SYNC, WITHOUT):
        dropped = find_dropped(graph, fix)
        spared = _find_copies_back(graph, dropped) if fix.what == SYNC else dropped
        return np.where(dropped | spared, 0.0, durations)
    if fix.what == NETWORK:
        return _speed_up_network(graph, fix.number, durations)
    if fix.what == REDUCE_DTYPE:
        return _halve_gradients(graph, fix, durations)
    if fix.what == COMPUTE:
        return np.where(graph.is_of(lambda kind: kind.name in ON_DEVICE), durations / fix.number, durations)
    if fix.what == RANKS:
        return _scale_out(graph, round(fix.number), durations)
    raise AssertionError(fix.what)


def bound_durations(graph: OperationGraph, fix: Fix, durations: Floats) -> Floats | None:
    """Return the longest durations after a change of the number of ranks where the run does not tell all; else None.

    Of transfers of sizes too alike it is not known which part is latency, which grows with every turn of the ring.
    """
    if fix.what != RANKS:
        return None
    return _scale_out(graph, round(fix.number), durations, unknown_is_latency=True)


def _choose_ranks(graph: OperationGraph, fix: Fix) -> Collection[int]:
    known = sorted(set(graph.rank[graph.rank >= 0].tolist()))
    if fix.what == RANK:
        chosen = [int(part) for part in fix.value.split(",")]
        for rank in chosen:
            if rank not in known:
                raise UsageError(f"--fix {fix}: the run has no rank {rank}; expected one of {list_ranks(known)}")
        return chosen
    if fix.what == HOST:
        hosts = sorted(set(graph.hosts.values()))
        if fix.value not in hosts:
            names = ", ".join(hosts) or "none: the run names no host"
            raise UsageError(f"--fix {fix}: no rank ran on this host; expected one of {names}")
        return [rank for rank, host in graph.hosts.items() if host == fix.value]
    stages = distinct(graph.stage[graph.stage >= 0]).tolist()
    if len(stages) < 2:
        raise UsageError(f"--fix {fix}: the run has no pipeline of several stages; expected a pipeline-parallel run")
    stage = stages[-1] if fix.value == LAST else int(fix.value)
    if stage not in stages:
        raise UsageError(f"--fix {fix}: the run has no stage {stage}; expected 0 to {stages[-1]}, or last")
    return sorted(set(graph.rank[graph.stage == stage].tolist()))


def _liken(graph: OperationGraph, ranks: Collection[int], durations: Floats, fix: Fix) -> Floats:
    """Return durations with the phases of some ranks scaled to the mean of the others."""
    fixed = np.isin(graph.rank, list(ranks))
    others = (graph.rank >= 0) & ~fixed
    if not others.any():
        raise UsageError(f"--fix {fix} names every rank; expected some, for the others to show how fast they can be")
    replaced = durations.copy()
    for stage in distinct(graph.stage[fixed]).tolist():
        of_stage = fixed & (graph.stage == stage)
        same = others & (graph.stage == stage)
        alike = same if same.any() else others
        for number, kind in enumerate(graph.kinds):
            if kind.is_communication:
                continue
            own, other = of_stage & (graph.kind == number), alike & (graph.kind == number)
            spent = durations[own].sum() / len(distinct(graph.rank[of_stage]))
            usual = durations[other].sum() / len(distinct(graph.rank[alike]))
            if spent > 0:
                replaced[own] *= usual / spent
    return replaced


def _of_operation(graph: OperationGraph, name: str, *, option: str, is_issued: bool = False) -> Mask:
    """Return the nodes of an operation or phase; with `is_issued`, of operations between ranks alone.

    Raises:
        UsageError: there are none.
    """
    kinds = [kind for kind in graph.kinds if kind.is_communication or not is_issued]
    chosen = graph.is_of(lambda kind: kind in kinds and name in (kind.op, kind.name))
    if not chosen.any():
        names = dict.fromkeys(name for kind in kinds for name in (kind.op, kind.name) if name)
        known = f"expected one of {', '.join(names)}" if names else "expected an operation between ranks: there is none"
        raise UsageError(f"{option}: the measured steps have no such operation; {known}")
    return chosen


@dataclass(frozen=True, kw_only=True)
class TransferCost:
    """Cost model of transfers of one kind: a latency, and a time that grows with size."""

    latency_ns: float
    ns_per_byte: float | None  # None: sizes are not known, or too alike to tell


def fit_costs(nbytes: Column, took: Floats) -> TransferCost:
    """Fit the cost of transfers to sizes, by least squares over the median of each size."""
    known = nbytes > 0
    sizes, place = number_distinct(nbytes[known])
    if len(sizes) < 2 or sizes[-1] < MIN_SIZES_RATIO * sizes[0]:
        return TransferCost(latency_ns=0.0, ns_per_byte=None)
    medians = np.array([median(took[known][place == i]) for i in range(len(sizes))])
    slope, intercept = np.polyfit(sizes.astype(np.float64), medians, 1)
    latency = min(max(float(intercept), 0.0), float(medians.min()))
    return TransferCost(latency_ns=latency, ns_per_byte=max(float(slope), 0.0))


def _speed_up_network(graph: OperationGraph, factor: float, durations: Floats) -> Floats:
    """Return durations with the part of each transfer that grows with its size divided by a factor."""
    transfers = graph.is_of(lambda kind: kind.is_communication)
    if not transfers.any():
        raise Unpredictable(f"network={factor:g}x: the measured steps have no communication between ranks")
    return _shorten_transfers(graph, transfers, factor, durations)


def _halve_gradients(graph: OperationGraph, fix: Fix, durations: Floats) -> Floats:
    """Return durations with gradients of 32 bits reduced in 16."""
    chosen = find_wide_gradients(graph)
    if not chosen.any():
        raise Unpredictable(
            f"{fix}: the measured steps reduce no gradients of 32 bits on a device (on the host, sums of 16 bits cost "
            "what the shorter messages save)"
        )
    return _shorten_transfers(graph, chosen, 2.0, durations)


def _shorten_transfers(graph: OperationGraph, chosen: Mask, factor: float, durations: Floats) -> Floats:
    """Return durations with the part of these transfers that grows with their size divided by a factor."""
    faster = durations.copy()
    for number in distinct(graph.kind[chosen]).tolist():
        of_kind = graph.kind == number
        latency = fit_costs(graph.nbytes[of_kind], graph.durations[of_kind]).latency_ns
        own = of_kind & chosen
        rest = np.maximum(durations[own] - latency, 0.0)
        faster[own] = durations[own] - rest + rest / factor
    return faster


def find_gradient_reductions(graph: OperationGraph, *ops: str) -> Mask:
    """Return which nodes reduce gradients between data-parallel replicas by one of these operations."""
    chosen: Mask = graph.is_of(lambda kind: kind.op in ops and kind.group in (*DATA_PARALLEL, *WHOLE_JOB)) & (
        graph.issued_by >= 0
    )
    if chosen.any():
        chosen &= graph.nbytes >= SMALLEST_BUCKET * graph.nbytes[chosen].max()
    return chosen


def find_wide_gradients(graph: OperationGraph) -> Mask:
    """Return which nodes reduce gradients of 32 bits on a device."""
    return find_gradient_reductions(graph, "all_reduce", "reduce_scatter") & graph.is_wide_sum


def _scale_out(graph: OperationGraph, num_ranks: int, durations: Floats, *, unknown_is_latency: bool = False) -> Floats:
    """Return durations with collectives between replicas over more ranks, each rank with as much work as now.

    Parameters:
        unknown_is_latency: transfers whose latency is not known are nothing else; otherwise they have none.
    """
    world = graph.world_size
    name = f"ranks={num_ranks}"
    axes = [axis for axis in DATA_PARALLEL if graph.group_sizes.get(axis, 1) > 1][:1]
    if not axes and not any(graph.group_sizes.get(axis, 1) > 1 for axis in OF_MODEL):
        axes = [axis for axis in WHOLE_JOB if graph.group_sizes.get(axis, 1) > 1][:1]
    if not axes:
        raise Unpredictable(
            f"{name}: what a collective between data-parallel replicas costs was not measured in this run"
        )
    old, model = graph.group_sizes[axes[0]], world // graph.group_sizes[axes[0]]
    if num_ranks % model:
        raise UsageError(f"--ranks {num_ranks}: expected a multiple of {model}, the ranks of one replica in this run")
    new = num_ranks // model
    if not 1 < new <= MAX_GROWTH * old:
        raise Unpredictable(
            f"{name}: {plural(new, 'replica')} from the {old} that were measured; expected 2 to {MAX_GROWTH * old}"
        )
    scaled = durations.copy()
    for number, kind in enumerate(graph.kinds):
        size = graph.group_sizes.get(kind.group, 1)
        if kind.is_communication and size > 1 and (kind.group == axes[0] or size == world):
            larger = size * new / old
            own = graph.kind == number
            cost = fit_costs(graph.nbytes[own], graph.durations[own])
            is_latency = unknown_is_latency and cost.ns_per_byte is None
            rest = np.maximum(durations[own] - (np.inf if is_latency else cost.latency_ns), 0.0)
            # A ring passes (n - 1) / n of the data over each link, in n - 1 turns.
            scaled[own] = (durations[own] - rest) * (larger - 1) / (size - 1) + rest * (
                (larger - 1) / larger * size / (size - 1)
            )
    return scaled


def find_dropped(graph: OperationGraph, fix: Fix) -> Mask:
    """Return the operations that are not issued after a change.

    Raises:
        UsageError: the run has no such operation.
        Unpredictable: no gradients are reduced again in the same step.
    """
    if fix.what == WITHOUT:
        return _of_operation(graph, fix.value, option=f"--without {fix.value}", is_issued=True)
    if not graph.is_superseded.any():
        raise Unpredictable(
            f"{fix}: in no measured step does DDP reduce its gradients more than once; expected backward passes that "
            "accumulate gradients without no_sync()"
        )
    return graph.is_superseded


def _find_copies_back(graph: OperationGraph, reductions: Mask) -> Mask:
    """Return the computation in which DDP takes gradients out of its buckets: from the wait for them to the end of the
    backward pass.
    """
    dependencies, is_backward = graph.dependencies, graph.is_of(lambda kind: kind.name == events.BACKWARD)
    is_other = graph.is_of(lambda kind: not kind.is_communication) & ~is_backward
    waits, found = np.zeros((2, dependencies.num_nodes), np.bool_)
    waits[dependencies.after[reductions[dependencies.before]]] = True
    for chain in graph.chains:
        places = np.arange(len(chain))
        newest_wait, newest_other = (
            np.maximum.accumulate(np.where(some[chain], places, -1)) for some in (waits, is_other)
        )
        found[chain] = is_backward[chain] & (newest_wait > newest_other)
    return found


def measure_beside(graph: OperationGraph, operations: Mask) -> float:
    """Return how long the ranks compute in a step while these operations of theirs are under way, the mean; ns."""
    ends = graph.replay_ends()
    num_ranks = len(distinct(graph.rank[operations]))
    # The ranks one after the other, each on a stretch of time of its own.
    origin = graph.rank * int(ends.max() + 1)
    begin, end = (origin + times.astype(np.int64) for times in (ends - graph.durations, ends))
    computes = graph.is_of(lambda kind: not kind.is_communication)
    under_way, busy = (cover(begin[some], end[some]) for some in (operations, computes))
    return total(intersect(under_way, busy)) / max(1, num_ranks * graph.num_steps)


def drop_waits(graph: OperationGraph, operations: Mask) -> Dependencies:
    """Return dependencies in which nobody waits for these operations."""
    dependencies = graph.dependencies
    is_communication = graph.is_of(lambda kind: kind.is_communication)
    kept = ~(operations[dependencies.before] & ~is_communication[dependencies.after])
    kept |= graph.rank[dependencies.after] < 0  # the next operation of the group begins after it, as before
    return Dependencies(
        num_nodes=dependencies.num_nodes, before=dependencies.before[kept], after=dependencies.after[kept]
    )


def overlap_fully(graph: OperationGraph) -> Dependencies:
    """Return dependencies in which collectives are waited for at the end of their step only; messages as they are."""
    is_collective = graph.is_of(lambda kind: kind.is_communication and kind.op not in events.POINT_TO_POINT)
    dependencies = graph.dependencies
    waits = (
        is_collective[dependencies.before] & ~is_collective[dependencies.after] & (graph.rank[dependencies.after] >= 0)
    )
    sources, targets = dependencies.before[waits], dependencies.after[waits]
    ends = np.stack(graph.step_ends)
    place = {rank: column for column, rank in enumerate(graph.rank[ends[0]].tolist())}
    moved = np.array(
        [
            ends[step, place[rank]] if rank in place else target
            for step, rank, target in zip(
                graph.step[targets].tolist(), graph.rank[targets].tolist(), targets.tolist(), strict=True
            )
        ],
        np.int64,
    )
    return Dependencies(
        num_nodes=dependencies.num_nodes,
        before=np.concatenate((dependencies.before[~waits], sources)),
        after=np.concatenate((dependencies.after[~waits], moved)),
    )
