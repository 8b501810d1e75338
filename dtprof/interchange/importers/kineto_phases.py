"""Steps and phases on the host of one torch.profiler trace: annotations of torch and of the program, and autograd."""

import re

import numpy as np

from dtprof.interchange.importers.kineto_events import KinetoTrace, TracedCall
from dtprof.intervals import Column, union
from dtprof.records import events

STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_PHASES = (
    (re.compile(r"Optimizer\.step#"), events.OPTIMIZER),
    (re.compile(r"enumerate\(DataLoader\)"), events.DATA),
    (re.compile(r"\W*(forward|fwd)\W*$", re.IGNORECASE), events.FORWARD),
    (re.compile(r"\W*(backward|bwd)\W*$", re.IGNORECASE), events.BACKWARD),
    (re.compile(r"\W*(optimizer|optimizer[ _.]step)\W*$", re.IGNORECASE), events.OPTIMIZER),
    (re.compile(r"\W*(data|dataload(er|ing)?)\W*$", re.IGNORECASE), events.DATA),
    (re.compile(r"\W*checkpoint(ing)?\W*$", re.IGNORECASE), events.CHECKPOINT),
)


def host_steps(trace: KinetoTrace) -> tuple[int | None, Column]:
    """Return the number of the first step, and the moments from its begin to the end of the last on the host."""
    marked: dict[int, TracedCall] = {}
    for call in trace.annotations:
        if match := STEP.match(call.name):
            marked.setdefault(int(match[1]), call)
    if not marked:
        return None, np.zeros(0, np.int64)
    calls = [marked[number] for number in sorted(marked)]
    times = np.array([calls[0].begin, *(call.end for call in calls)], np.int64) + trace.base_ns
    return min(marked), np.maximum.accumulate(times)


def host_phases(trace: KinetoTrace) -> list[tuple[str, Column, Column]]:
    """Return the phases on the host, each as begins and ends."""
    calls_of: dict[str, list[TracedCall]] = {}
    for call in trace.annotations:
        for pattern, phase in _PHASES:
            if pattern.match(call.name):
                calls_of.setdefault(phase, []).append(call)
                break
    spans = []
    for phase, calls in calls_of.items():
        times = np.array([(call.begin, call.end) for call in calls], np.int64).reshape(-1, 2) + trace.base_ns
        spans.append((phase, *union(times).T))
    if not (events.FORWARD in calls_of and events.BACKWARD in calls_of):
        spans += [span for span in _passes(trace) if span[0] not in calls_of]
    return spans


def _passes(trace: KinetoTrace) -> list[tuple[str, Column, Column]]:
    """Return forward and backward passes, from the links between operators and their backward nodes.

    A forward pass runs from the first operator that has a backward node to the first of these nodes, a backward pass
    from there to the last node before the next forward pass. Recomputation inside a backward pass is part of it.
    """
    at, _, code = trace.flows.columns(trace.base_ns)
    begin, end, _ = trace.backward.columns(trace.base_ns)
    if not len(at) or not len(begin):
        return []
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    starts = np.sort(at[code >= 0])
    # What runs inside a backward node is recomputation.
    inside = np.searchsorted(begin, starts, "right") - 1
    recomputes = (inside >= 0) & (starts < reach[np.maximum(inside, 0)])
    starts = starts[~recomputes]
    first_node = np.searchsorted(begin, starts, "left")  # of the backward pass that follows each operator
    known = first_node < len(begin)
    first_node, starts = first_node[known], starts[known]
    if not len(starts):
        return []
    opens = np.r_[True, np.diff(first_node) != 0]
    node = first_node[opens]
    forward = starts[opens], begin[node]
    last = np.r_[node[1:] - 1, len(begin) - 1]
    return [(events.FORWARD, *forward), (events.BACKWARD, begin[node], reach[last])]
