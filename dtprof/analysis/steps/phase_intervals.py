"""The phases of one rank as intervals of time: data, forward, backward, optimizer, checkpoint and the others recorded.

Only the threads that run the steps count. Where phases overlap, a moment belongs to the first of ORDER that covers it.
"""

import numpy as np

from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.columns import is_any
from dtprof.intervals import NONE, Column, Intervals, intersect, pair, subtract, union
from dtprof.job.valid_records import ENDED, spans_of, times_of
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables, select

ORDER = (
    events.GARBAGE_COLLECTION,
    events.COMPILE,
    events.DATA,
    events.CHECKPOINT,
    events.OPTIMIZER,
    events.RECOMPUTE,
    events.BACKWARD,
    events.EVALUATION,
    events.FORWARD,
)
"""Which phase a moment belongs to when spans overlap: the first here."""
BUSY = (events.DEVICE_BUSY, events.HOST_BUSY)
"""Spans of computation on a device; only imported runs have them."""
_OTHERS = (*BUSY, events.HOST_BOUND, events.GRAPH_REPLAY)
ACTIONS = {events.FORWARD: events.PIPELINE_FORWARD, events.BACKWARD: events.PIPELINE_BACKWARD}
"""Actions of pipeline stages by the phase they belong to."""
_OF_MODELS = (events.FORWARD, events.EVALUATION)
_ANYWHERE = (events.FORWARD, events.RECOMPUTE, events.COMPILE, events.GARBAGE_COLLECTION)
"""Phases that may lie between a forward pass and its backward pass without ending the loss."""


def find_phases(tables: RankTables, spans: Array, steps: RankSteps) -> dict[str, Intervals]:
    """Return the intervals of each phase; they may overlap between phases.

    A failed forward span may end when the next one begins instead of when it failed, so it is dropped.
    """
    ended = select(
        spans,
        is_any(spans["thread"], steps.threads) & is_any(spans["state"], ENDED) & (spans["end_ns"] != UNKNOWN_NS),
    )
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(tables.ops):
        numbers.setdefault(name, []).append(number)

    ops, times, is_done = np.ascontiguousarray(ended["op"]), times_of(ended), ended["state"] == codes.DONE

    def intervals(phase: str) -> Intervals:
        chosen = is_any(ops, numbers.get(phase, ()))
        if phase in _OF_MODELS:
            chosen &= is_done
        actions = [number for action in ACTIONS.get(phase, ()) for number in numbers.get(action, ())]
        if actions:
            chosen |= is_any(ops, actions)
        return union(times[chosen])

    recorded = {*numbers, *(phase for phase, actions in ACTIONS.items() if not numbers.keys().isdisjoint(actions))}
    found = {phase: intervals(phase) if phase in recorded else NONE for phase in (*ORDER, *_OTHERS)}
    if events.PP_FORWARD in tables.ops:
        return found  # with the loss; between a forward and a backward a stage waits for others
    if len(found[events.FORWARD]):
        found[events.FORWARD] = _with_loss(found)
    else:
        found[events.FORWARD] = _inferred_forward(found, steps)
    found[events.OPTIMIZER] = _without_closures(found)
    return found


def _without_closures(found: dict[str, Intervals]) -> Intervals:
    """Return the optimizer intervals without the forward and backward passes of its closure (as LBFGS runs)."""
    optimizer, backward = found[events.OPTIMIZER], found[events.BACKWARD]
    first = np.searchsorted(backward[:, 0], optimizer[:, 0], "left")
    has_backward = first < np.searchsorted(backward[:, 1], optimizer[:, 1], "right")
    if not has_backward.any():
        return optimizer
    passes = union(np.concatenate([found[phase] for phase in (events.FORWARD, events.BACKWARD, events.EVALUATION)]))
    return subtract(optimizer, intersect(passes, optimizer[has_backward]))


def find_user_phases(tables: RankTables, spans: Array, steps: RankSteps) -> dict[str, Intervals]:
    """Return the intervals of the phases that the program marked, on the threads that run the steps."""
    names = dict.fromkeys(name for name in tables.ops if name.startswith(events.USER_PHASE))
    own = select(spans, is_any(spans["thread"], steps.threads)) if names else spans
    return {name.removeprefix(events.USER_PHASE): union(times_of(spans_of(own, tables, name, ENDED))) for name in names}


def _with_loss(found: dict[str, Intervals]) -> Intervals:
    """Extend forward to the begin of the next backward if no other span lies between: the loss counts as forward."""
    forward, backward = found[events.FORWARD], found[events.BACKWARD]
    before = np.searchsorted(forward[:, 1], backward[:, 0], "right") - 1
    backward, before = backward[before >= 0], before[before >= 0]
    ended = forward[before, 1]
    others = np.sort(np.concatenate([found[phase][:, 0] for phase in ORDER if phase not in _ANYWHERE]))
    between = np.searchsorted(others, backward[:, 0], "left") > np.searchsorted(others, ended, "left")
    return union(np.concatenate((forward, pair(ended, backward[:, 0])[~between])))


def _inferred_forward(found: dict[str, Intervals], steps: RankSteps) -> Intervals:
    """Infer forward passes where none were recorded: from the step's begin, or the last other span, to each backward.

    Before the first step that has a begin, a forward pass must follow a data, checkpoint, backward or evaluation span.
    """
    backward = found[events.BACKWARD]
    if not len(backward):
        return NONE
    begin = np.full(len(backward), -1, np.int64)
    ends = [found[phase][:, 1] for phase in (events.DATA, events.CHECKPOINT, events.BACKWARD, events.EVALUATION)]
    for column in [*ends, steps.windows[:, 0]]:
        begin = np.maximum(begin, _last_before(column, backward[:, 0]))
    known = begin >= 0
    return union(pair(begin[known], backward[known, 0]))


def _last_before(times: Column, moments: Column) -> Column:
    """Return for each moment the last of the sorted times that is not after it; -1 where there is none."""
    at = np.searchsorted(times, moments, "right") - 1
    return np.where(at >= 0, times[at], -1) if len(times) else np.full(len(moments), -1, np.int64)
