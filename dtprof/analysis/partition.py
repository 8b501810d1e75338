"""The exact partition of a rank's steps into parts, and the second, independent one into phases.

Where parts overlap a moment belongs to the first of: in the window of a pipeline and in none of its actions (bubble),
blocked by communication that moves data (exposed_transfer), blocked by communication that waits for another rank
(exposed_wait), data, checkpoint, optimizer, forward or backward (compute); what nothing covers is host, and so are
pauses: compilation and garbage collection, wherever they happen. Idle is not recorded and is 0.
"""

from collections.abc import Sequence

import numpy as np

from dtprof import events
from dtprof.analysis.intervals import Column, Intervals, share_out, union
from dtprof.analysis.phases import ORDER
from dtprof.analysis.results import PARTS, PHASES

_COVERED = (
    "bubble",
    "exposed_transfer",
    "exposed_wait",
    "pauses",
    "data",
    "checkpoint",
    "optimizer",
    "compute",
    "host",
)
_PAUSES = (events.GARBAGE_COLLECTION, events.COMPILE)
_COMPUTE = (events.FORWARD, events.RECOMPUTE, events.BACKWARD, events.EVALUATION)


NO_INTERVALS: Intervals = np.zeros((0, 2), np.int64)


def partition_steps(
    windows: Intervals,
    phases: dict[str, Intervals],
    exposed_wait: Intervals,
    exposed_transfer: Intervals,
    bubbles: Intervals = NO_INTERVALS,
) -> dict[str, Column]:
    """Return for each part how long it took in each step; the parts sum to the step."""
    shares = share_out(
        [
            bubbles,
            union(exposed_transfer),
            union(exposed_wait),
            union(np.concatenate([phases[pause] for pause in _PAUSES])),
            phases[events.DATA],
            phases[events.CHECKPOINT],
            phases[events.OPTIMIZER],
            union(np.concatenate([phases[phase] for phase in _COMPUTE])),
        ],
        windows,
    )
    covered = {part: shares[:, i] for i, part in enumerate(_COVERED)}
    covered["host"] = covered["host"] + covered.pop("pauses")
    return dict.fromkeys(PARTS, np.zeros(len(windows), np.int64)) | covered


def partition_phases(windows: Intervals, phases: dict[str, Intervals]) -> dict[str, Column]:
    """Return for each phase how long it took in each step; they sum to the step."""
    shares = share_out([phases[phase] for phase in ORDER], windows)
    by_phase = {phase: shares[:, i] for i, phase in enumerate((*ORDER, "other"))}
    return {phase: by_phase[phase] for phase in PHASES}


def average(parts: dict[str, Column]) -> dict[str, int]:
    """Return the mean of each part, rounded so that they sum to the rounded mean of the whole.

    What rounding down leaves over goes, 1 ns each, to the parts that lost most by it.
    """
    totals = {part: int(column.sum()) for part, column in parts.items()}
    num_steps = max((len(column) for column in parts.values()), default=0)
    if not num_steps:
        return dict.fromkeys(parts, 0)
    means = {part: total // num_steps for part, total in totals.items()}
    left = sum(totals.values()) // num_steps - sum(means.values())
    by_loss: Sequence[str] = sorted(totals, key=lambda part: -(totals[part] % num_steps))
    for part in by_loss[:left]:
        means[part] += 1
    return means
