"""Predict the change of a step with gradient buckets of another size.

A bucket is ready when as many bytes of gradients are there as it and those before it hold, at the pace at which the
buckets of the run filled; its transfer costs what the sizes of the run show. Buckets follow one another.
"""

import numpy as np

from dtprof.analysis.whatif.fixes import Unpredictable, find_gradient_reductions, fit_costs
from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.columns import number_distinct
from dtprof.intervals import Column, Floats


def replay_buckets(graph: OperationGraph, size: int) -> tuple[Floats, float]:
    """Return the time that buckets of this size add to each step, and the error of the modelled present buckets; ns.

    Raises:
        Unpredictable: the run has no gradient buckets of several sizes.
    """
    name = f"buckets={size}"
    chosen = find_gradient_reductions(graph, "all_reduce")
    rows = np.flatnonzero(chosen)
    if not len(rows) or not graph.nbytes[rows].any():
        raise Unpredictable(f"{name}: the measured steps have no all_reduce of gradients over data-parallel replicas")
    cost = fit_costs(graph.nbytes[rows], graph.durations[rows])
    if cost.ns_per_byte is None:
        raise Unpredictable(
            f"{name}: all buckets are about as large, so that a latency and a bandwidth cannot be told apart; record a "
            "run with buckets of several sizes"
        )
    ends = graph.replay_ends()
    if _are_waited_for_in_turn(graph, rows, ends):
        raise Unpredictable(
            f"{name}: the program waits for most reductions before it issues the next, so that the records do not tell "
            "when the gradients of a larger bucket are there"
        )
    added, missed = np.zeros((2, graph.num_steps))
    for step in range(graph.num_steps):
        some = rows[graph.step[rows] == step]
        instances, place = number_distinct(graph.instance[some])
        ready = np.full(len(instances), -np.inf)
        np.maximum.at(ready, place, ends[graph.issued_by[some]])
        nbytes = np.zeros(len(instances))
        nbytes[place] = graph.nbytes[some]
        order = np.argsort(ready, kind="stable")
        if len(order):
            added[step] = _finish(*_refill(ready[order], nbytes[order], size), cost.latency_ns, cost.ns_per_byte)
            present = _finish(ready[order], nbytes[order], cost.latency_ns, cost.ns_per_byte)
            added[step] -= present
            missed[step] = abs(present - ends[some].max())
    return added, float(missed.mean())


def _are_waited_for_in_turn(graph: OperationGraph, rows: Column, ends: Floats) -> bool:
    """Say whether ranks wait for most of these operations before they issue the next in the same step."""
    before, after = graph.dependencies.before, graph.dependencies.after
    is_wait = np.isin(before, rows) & (graph.rank[after] >= 0) & (graph.instance[after] < 0)
    waited_until = np.full(len(ends), np.inf)
    np.minimum.at(waited_until, before[is_wait], ends[after[is_wait]])
    issued = ends[graph.issued_by[rows]]
    order = np.lexsort((issued, graph.step[rows], graph.rank[rows]))
    rows, issued = rows[order], issued[order]
    is_next = (np.diff(graph.rank[rows]) == 0) & (np.diff(graph.step[rows]) == 0)
    return bool(2 * np.count_nonzero((waited_until[rows[:-1]] <= issued[1:])[is_next]) > np.count_nonzero(is_next))


def largest_bucket(graph: OperationGraph) -> int:
    """Return the bytes of the largest gradient bucket; 0 where there is none."""
    return int(graph.nbytes[find_gradient_reductions(graph, "all_reduce")].max(initial=0))


def _refill(ready: Floats, nbytes: Floats, size: int) -> tuple[Floats, Floats]:
    """Return when buckets of another size are ready, and their sizes."""
    there = np.cumsum(nbytes)
    pace = (ready[-1] - ready[0]) / max(there[-1] - there[0], 1.0)
    first = ready[0] - pace * nbytes[0]
    bounds = np.append(np.arange(size, there[-1], size, dtype=np.float64), there[-1])
    return np.interp(bounds, np.r_[0.0, there], np.r_[first, ready]), np.diff(bounds, prepend=0.0)


def _finish(ready: Floats, nbytes: Floats, latency_ns: float, ns_per_byte: float) -> float:
    """Return when the last bucket is reduced."""
    end = -np.inf
    for begin, length in zip(ready.tolist(), nbytes.tolist(), strict=True):
        end = max(end, begin) + latency_ns + ns_per_byte * length
    return float(end)
