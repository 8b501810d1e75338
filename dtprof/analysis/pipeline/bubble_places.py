"""Where the bubbles of a pipeline are: by stage, microbatch and step.

A bubble belongs to the action that its rank is waiting to begin; the time after a rank's last action to the stage of
that action, and to no microbatch.
"""

import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dtprof.analysis.pipeline.schedule_replay import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOSS,
)
from dtprof.analysis.results import PipelineAction, PipelineStage, PipelineStep
from dtprof.columns import begins_of, distinct, is_any, mean_of_each, number_alike, number_distinct
from dtprof.intervals import Column, Intervals
from dtprof.records.tables import Array

MAX_LISTED = 4096
"""Stages times microbatches that are listed."""
NO_MICROBATCH = -1
TIMES = {"forward": (FORWARD, LOSS), "backward": (BACKWARD, BACKWARD_INPUT), "weight": (BACKWARD_WEIGHT,)}


class ActionTimes:
    """Sums times and bubbles by stage and microbatch, one rank of a pipeline after the other."""

    def __init__(self) -> None:
        """Begin without any."""
        self._sums: dict[tuple[int, int], npt.NDArray[np.float64]] = {}

    def add(self, actions: Array, steps: Column, windows: Intervals) -> None:
        """Take in the actions of one rank, which are those of some of these steps, by begin.

        Parameters:
            windows: of the pipeline in each step.
        """
        place = np.searchsorted(steps, actions["step"])
        inside = place < len(steps)
        inside[inside] = steps[place[inside]] == actions["step"][inside]
        actions, place = actions[inside], place[inside]
        if not len(actions):
            return
        order = np.lexsort((actions["begin"], place))
        actions, place = actions[order], place[order]
        is_first = begins_of(place)
        is_last = np.concatenate((is_first[1:], [True]))
        done = _latest_end(actions["end"], is_first)
        before = np.where(is_first, windows[place, 0], np.concatenate(([0], done[:-1])))
        idle = np.maximum(actions["begin"] - before, 0)
        took = actions["end"] - actions["begin"]
        num_steps = int(is_first.sum())
        self._sum(actions, idle, took, num_steps)
        tail = np.maximum(windows[place[is_last], 1] - done[is_last], 0)
        for stage in distinct(actions["stage"][is_last]).tolist():
            own = actions["stage"][is_last] == stage
            row = self._sums.setdefault((stage, NO_MICROBATCH), np.zeros(len(TIMES) + 1))
            row[-1] += tail[own].sum() / num_steps

    def _sum(self, actions: Array, idle: Column, took: Column, num_steps: int) -> None:
        kinds = [is_any(actions["kind"], kinds) for kinds in TIMES.values()]
        number, first = number_alike(actions["stage"], actions["microbatch"])
        columns = [np.bincount(number[own], took[own], len(first)) for own in kinds]
        columns.append(np.bincount(number, idle, len(first)))
        keys = zip(actions["stage"][first].tolist(), actions["microbatch"][first].tolist(), strict=True)
        for key, row in zip(keys, np.stack(columns, axis=1) / num_steps, strict=True):
            self._sums[key] = self._sums[key] + row if key in self._sums else row

    def listed(self, num_pipelines: int) -> tuple[PipelineAction, ...]:
        """Return each stage and microbatch, mean over replicas and steps; of more than MAX_LISTED the first."""
        rows = []
        for key, sums in sorted(self._sums.items())[:MAX_LISTED]:
            stage, microbatch = key
            forward, backward, weight, bubble = (round(ns / num_pipelines) for ns in sums.tolist())
            is_tail = microbatch == NO_MICROBATCH
            rows.append(
                PipelineAction(
                    stage=stage,
                    microbatch=None if is_tail else microbatch,
                    forward_ns=None if is_tail else forward,
                    backward_ns=None if is_tail else backward,
                    weight_ns=None if is_tail else weight,
                    bubble_ns=bubble,
                )
            )
        return tuple(rows)


def sum_stages(actions: Iterable[PipelineAction]) -> tuple[PipelineStage, ...]:
    """Return the sums of each stage over its microbatches, given those in the order of the stages."""
    by_stage = ((stage, list(own)) for stage, own in itertools.groupby(actions, key=attrgetter("stage")))
    return tuple(
        PipelineStage(
            stage=stage,
            forward_ns=sum(one.forward_ns or 0 for one in own),
            backward_ns=sum(one.backward_ns or 0 for one in own),
            weight_ns=sum(one.weight_ns or 0 for one in own),
            bubble_ns=sum(one.bubble_ns for one in own),
        )
        for stage, own in by_stage
    )


def _latest_end(ends: Column, is_first: npt.NDArray[np.bool_]) -> Column:
    """Return the latest end of an action so far in its step."""
    latest: Column = ends.copy()
    for begin, stop in zip(np.flatnonzero(is_first), np.append(np.flatnonzero(is_first)[1:], len(ends)), strict=True):
        latest[begin:stop] = np.maximum.accumulate(latest[begin:stop])
    return latest


def list_steps(by_pipeline: Sequence[tuple[Column, Column, npt.NDArray[np.float64]]]) -> tuple[PipelineStep, ...]:
    """Return the window and the bubble fraction of each step, mean over pipelines.

    Parameters:
        by_pipeline: of each pipeline its steps, the lengths of their windows, and their bubble fractions.
    """
    numbers = np.concatenate([steps for steps, _, _ in by_pipeline])
    lengths, fractions = (np.concatenate([one[i] for one in by_pipeline]) for i in (1, 2))
    steps, place = number_distinct(numbers)
    windows, bubbles = (mean_of_each(place, values) for values in (lengths, fractions))
    return tuple(
        PipelineStep(step=step, window_ns=round(window), bubble_fraction=bubble)
        for step, window, bubble in zip(steps.tolist(), windows.tolist(), bubbles.tolist(), strict=True)
    )
