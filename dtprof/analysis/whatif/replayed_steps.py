"""One step as it is replayed, before and after a change: what each rank does, and what it waits for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.pipeline.schedule_replay import BACKWARD_WEIGHT, FORWARD, LOSS
from dtprof.analysis.results import TimelineBar
from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.analysis.whatif.schedule_fixes import ReplayedPlan
from dtprof.columns import distinct
from dtprof.intervals import Column, Floats

MAX_RANKS = 16
MAX_BARS = 200
"""Of each rank; of more the longest."""
WAIT, TRANSFER = "exposed_wait", "exposed_transfer"
LANE = "phases"
_ACTIONS = {FORWARD: ("forward", "F"), LOSS: ("loss", "L"), BACKWARD_WEIGHT: ("weight_gradient", "W")}


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """One step of some ranks; times of intervals in ns since it began."""

    title: str
    step_ns: float
    ranks: tuple[int, ...]
    intervals: tuple[TimelineBar, ...]


def draw_graph_step(graph: OperationGraph, durations: Floats, *, place: int, title: str) -> ReplayedStep | None:
    """Draw the step at a place among those of a graph, as it is with these durations; None where no line is known."""
    if not graph.chains:
        return None
    ends = graph.dependencies.replay(durations[:, np.newaxis])[:, 0]
    last = [float(ends[nodes].max()) for nodes in graph.step_ends]
    begin = last[place - 1] if place else float(ends[graph.begins].max())
    arrived = _arrivals(graph, ends, durations)
    chosen = [graph.chains[i] for i in distinct(np.linspace(0, len(graph.chains) - 1, MAX_RANKS).astype(int))]
    bars: list[TimelineBar] = []
    for chain in chosen:
        bars += _draw_chain(graph, chain, ends, arrived, place=place, origin=begin)
    return ReplayedStep(
        title=title,
        step_ns=last[place] - begin,
        ranks=tuple(int(graph.rank[chain[0]]) for chain in chosen),
        intervals=tuple(bars),
    )


def _arrivals(graph: OperationGraph, ends: Floats, durations: Floats) -> Floats:
    """Return when what a node waits for began to move data, the last of several; -inf: it waits for no operation."""
    arrived = np.full(len(ends), -np.inf)
    edges = graph.dependencies
    waits = graph.is_of(lambda kind: kind.is_communication)[edges.before]
    before = edges.before[waits]
    np.maximum.at(arrived, edges.after[waits], ends[before] - durations[before])
    return arrived


def _draw_chain(
    graph: OperationGraph, chain: Column, ends: Floats, arrived: Floats, *, place: int, origin: float
) -> list[TimelineBar]:
    """Draw the pieces of one rank's line in one step; neighbours of a kind are one bar."""
    at = np.flatnonzero(graph.step[chain] == place)
    at = at[at > 0]
    nodes = chain[at]
    begins, stops = ends[chain[at - 1]] - origin, ends[nodes] - origin
    kinds: list[str] = []
    edges: list[tuple[float, float]] = []
    for node, begin, end in zip(nodes.tolist(), begins.tolist(), stops.tolist(), strict=True):
        pieces = [(begin, end, graph.kinds[graph.kind[node]].name if graph.kind[node] >= 0 else TRANSFER)]
        if graph.kind[node] < 0 and arrived[node] > -np.inf:
            middle = min(max(float(arrived[node]) - origin, begin), end)
            pieces = [(begin, middle, WAIT), (middle, end, TRANSFER)]
        for start, stop, kind in pieces:
            if stop <= start:
                continue
            if kinds and kinds[-1] == kind and start <= edges[-1][1]:
                edges[-1] = (edges[-1][0], stop)
            else:
                kinds.append(kind)
                edges.append((start, stop))
    rank = int(graph.rank[chain[0]])
    longest = sorted(range(len(kinds)), key=lambda i: edges[i][0] - edges[i][1])[:MAX_BARS]
    return [_bar(rank, kinds[i].replace("_", " "), kinds[i], *edges[i]) for i in sorted(longest)]


def draw_plan_step(found: ReplayedPlan, ranks: Sequence[int], *, title: str) -> ReplayedStep:
    """Draw the actions of a pipeline in one step.

    Parameters:
        ranks: of the pipeline, as the plan has them in turn.
    """
    acts = [(rank, act) for rank, own in zip(ranks, found.plan, strict=True) for act in own]
    bars = []
    for (rank, act), begin, end in zip(acts, found.begins_ns.tolist(), found.ends_ns.tolist(), strict=True):
        kind, letter = _ACTIONS.get(act.kind, ("backward", "B"))
        bars.append(_bar(rank, f"{letter}{act.microbatch} of stage {act.stage}", kind, begin, end))
    return ReplayedStep(title=title, step_ns=float(found.ends_ns.max()), ranks=tuple(ranks), intervals=tuple(bars))


def _bar(rank: int, name: str, kind: str, begin: float, end: float) -> TimelineBar:
    label = f"{name} on rank {rank}\n{(end - begin) / 1e6:.3g} ms, from {begin / 1e6:.3g} ms"
    return TimelineBar(
        rank=rank, lane=LANE, name=name, kind=kind, begin_ns=round(begin), end_ns=round(end), label=label
    )
