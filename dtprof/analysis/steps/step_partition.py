"""Partition a rank's steps exactly into parts, and independently into phases.

Where parts overlap, a moment belongs to the first of: in the window of a pipeline but in none of its actions, nor in
data, checkpoint or optimizer (bubble), blocked by communication that moves data (exposed_transfer), blocked by
communication that waits for another rank (exposed_wait), data, checkpoint, optimizer, forward or backward (compute).
Uncovered time is host, and so are compilation and garbage collection, wherever they happen. Idle is not recorded and is
0. On a device's timeline (job/device_timeline.py) host-bound stretches come before optimizer and compute, and are host.

For an imported run with device activity the device is partitioned instead: its kernels are optimizer during an
optimizer step, else compute, and uncovered time is idle.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dtprof.analysis.results import PARTS, PHASES
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.columns import is_among
from dtprof.intervals import NONE, Column, Intervals, intersect, paint, pair, share_out, subtract, union
from dtprof.records import events

_COVERED = (
    "bubble",
    "exposed_transfer",
    "exposed_wait",
    "pauses",
    "data",
    "checkpoint",
    "host_bound",
    "optimizer",
    "compute",
    "host",
)
_COVERED_ON_DEVICE = (*_COVERED[:3], "optimizer", "compute", "data", "checkpoint", "idle")
_OF_HOST = {"pauses", "host_bound"}
_OUTSIDE_BUBBLES = (events.DATA, events.CHECKPOINT, events.OPTIMIZER)
"""What a stage does for itself while other stages still compute: it does not wait for a microbatch then."""
_PAUSES = (events.GARBAGE_COLLECTION, events.COMPILE)
_COMPUTE = (events.FORWARD, events.RECOMPUTE, events.BACKWARD, events.EVALUATION, events.GRAPH_REPLAY)


def partition_steps(
    windows: Intervals,
    phases: dict[str, Intervals],
    exposed_wait: Intervals,
    exposed_transfer: Intervals,
    bubbles: Intervals = NONE,
) -> dict[str, Column]:
    """Return the time of each part in each step, ns; the parts sum to the step."""
    shares = share_out(_layers(phases, exposed_wait, exposed_transfer, bubbles), windows)
    covered = {part: shares[:, i] for i, part in enumerate(_name_owners(phases))}
    for part in _OF_HOST & covered.keys():
        covered["host"] = covered["host"] + covered.pop(part)
    return dict.fromkeys(PARTS, np.zeros(len(windows), np.int64)) | covered


def paint_steps(
    windows: Intervals,
    phases: dict[str, Intervals],
    exposed_wait: Intervals,
    exposed_transfer: Intervals,
    bubbles: Intervals = NONE,
) -> tuple[Intervals, Column]:
    """Return the intervals that `partition_steps` sums up, and the part of each as its position in PARTS."""
    cuts, owner = paint(_layers(phases, exposed_wait, exposed_transfer, bubbles), windows)
    part = np.array([PARTS.index("host" if name in _OF_HOST else name) for name in _name_owners(phases)])
    return _stretches(cuts, np.where(owner >= 0, part[owner], -1), windows)


def paint_phases(windows: Intervals, phases: dict[str, Intervals]) -> tuple[Intervals, Column]:
    """Return the intervals that `partition_phases` sums up, and the phase of each as its position in PHASES."""
    cuts, owner = paint([phases[phase] for phase in ORDER], windows)
    phase = np.array([PHASES.index(name) for name in (*ORDER, "other")])
    return _stretches(cuts, np.where(owner >= 0, phase[owner], -1), windows)


def _stretches(cuts: Column, owner: Column, windows: Intervals) -> tuple[Intervals, Column]:
    """Join adjacent intervals of one part or phase within one step."""
    if not len(cuts):
        return NONE, owner
    begins = is_among(cuts, windows[:, 0]) | (np.diff(owner, prepend=-2) != 0)
    first = np.flatnonzero(begins)
    stretches = pair(cuts[first], np.append(cuts[first[1:]], cuts[-1]))
    inside = (owner[first] >= 0) & (stretches[:, 1] > stretches[:, 0])
    return stretches[inside], owner[first][inside]


def _name_owners(phases: dict[str, Intervals]) -> tuple[str, ...]:
    """Return the part or phase of each layer, and last that of uncovered time."""
    return _COVERED_ON_DEVICE if len(phases[events.DEVICE_BUSY]) else _COVERED


def _layers(
    phases: dict[str, Intervals], exposed_wait: Intervals, exposed_transfer: Intervals, bubbles: Intervals
) -> list[Intervals]:
    """Return the intervals of each layer in the order of `_name_owners`; the first that covers a moment owns it."""
    if len(bubbles):
        bubbles = subtract(bubbles, union(np.concatenate([phases[phase] for phase in _OUTSIDE_BUBBLES])))
    blocked = [bubbles, union(exposed_transfer), union(exposed_wait)]
    if len(device := phases[events.DEVICE_BUSY]):
        optimizer = intersect(device, phases[events.OPTIMIZER])
        return [*blocked, optimizer, device, phases[events.DATA], phases[events.CHECKPOINT]]
    return [
        *blocked,
        union(np.concatenate([phases[pause] for pause in _PAUSES])),
        phases[events.DATA],
        phases[events.CHECKPOINT],
        phases[events.HOST_BOUND],
        phases[events.OPTIMIZER],
        union(np.concatenate([phases[phase] for phase in (*_COMPUTE, events.HOST_BUSY)])),
    ]


def partition_phases(windows: Intervals, phases: dict[str, Intervals]) -> dict[str, Column]:
    """Return the time of each phase in each step, ns; the phases sum to the step."""
    shares = share_out([phases[phase] for phase in ORDER], windows)
    by_phase = {phase: shares[:, i] for i, phase in enumerate((*ORDER, "other"))}
    return {phase: by_phase[phase] for phase in PHASES}


def sum_steps(parts: Mapping[str, Column], bounds: Sequence[int]) -> list[dict[str, int]]:
    """Return the sum of each part over the steps from each bound to the next."""
    so_far = np.zeros((len(parts), bounds[-1] + 1), np.int64)
    np.cumsum(list(parts.values()), axis=1, out=so_far[:, 1:])
    return [dict(zip(parts, own, strict=True)) for own in np.diff(so_far[:, bounds], axis=1).T.tolist()]


def round_means(totals: Mapping[str, int], num_steps: int) -> dict[str, int]:
    """Return the mean of each part, rounded so that they sum to the rounded mean of the whole.

    The remainder of rounding down goes, 1 ns each, to the parts that lost most by it.
    """
    if not num_steps:
        return dict.fromkeys(totals, 0)
    means = {part: total // num_steps for part, total in totals.items()}
    left = sum(totals.values()) // num_steps - sum(means.values())
    by_loss: Sequence[str] = sorted(totals, key=lambda part: -(totals[part] % num_steps))
    for part in by_loss[:left]:
        means[part] += 1
    return means
