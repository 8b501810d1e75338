"""Slack: how much of a rank's delay the bubbles of its pipeline absorb.

The steps whose actions are kept are replayed twice (schedule_replay.py): as they were, and with the actions of the slow
rank as long as those of its stage in other replicas, or of the other stages where its whole stage is slow. Slack is the
part of the time taken off the actions by which the window does not get shorter.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dtprof.analysis.pipeline.bubbles import RankPipeline
from dtprof.analysis.pipeline.schedule_replay import Act, replay_windows
from dtprof.columns import distinct, mean_of_each, median, number_distinct
from dtprof.intervals import Column, Floats
from dtprof.records.tables import Array


class Slack:
    """Find the slack of ranks."""

    def __init__(self, pipelines: Mapping[int, RankPipeline], steps: tuple[int, int]) -> None:
        """Take the pipeline actions of all ranks, and the first and the last step to replay."""
        self._pipelines, self._steps = pipelines, steps
        self._known: dict[int, dict[int, float]] = {}

    def of(self, rank: int, *, whole_stage: bool) -> int:
        """Return the slack of one rank, ns a step; 0 without a pipeline, or where the steps cannot be replayed."""
        slow = self._pipelines.get(rank)
        if slow is None:
            return 0
        members = [other for other in self._pipelines.values() if other.key == slow.key]
        members.sort(key=lambda member: member.pipeline.group_rank)
        if len(members) != slow.pipeline.group_size:
            return 0
        per_rank = [self._chosen(member) for member in members]
        shortened = [_took(actions) for actions in per_rank]
        at = members.index(slow)
        shortened[at] = self._like_the_others(slow, per_rank[at], whole_stage=whole_stage)
        compared = _compare(per_rank, shortened)
        if compared is None:
            return 0
        saved, gained = compared
        return max(0, int((saved - gained).mean()))

    def _chosen(self, member: RankPipeline) -> Array:
        steps = member.actions["step"]
        return member.actions[(steps >= self._steps[0]) & (steps <= self._steps[1])]

    def _like_the_others(self, own: RankPipeline, actions: Array, *, whole_stage: bool) -> Floats:
        """Return the durations of the actions at the speed of comparable ranks; none longer than recorded."""
        others = [other for other in self._pipelines.values() if other is not own]
        alike = [other for other in others if (other.pipeline.stages == own.pipeline.stages) != whole_stage] or others
        took = _took(actions)
        for kind in distinct(actions["kind"]).tolist():
            rows = actions["kind"] == kind
            means = [mean for mean in (self._means(other).get(kind) for other in alike) if mean]
            mean = float(took[rows].mean())
            if means and mean > 0:
                took[rows] *= min(1.0, median(means) / mean)
        return took

    def _means(self, member: RankPipeline) -> dict[int, float]:
        """Return how long the actions of a rank take, by kind."""
        if member.rank not in self._known:
            actions = self._chosen(member)
            kinds, place = number_distinct(actions["kind"])
            means = mean_of_each(place, _took(actions))
            self._known[member.rank] = dict(zip(kinds.tolist(), means.tolist(), strict=True))
        return self._known[member.rank]


def _took(actions: Array) -> Floats:
    took: Floats = (actions["end"] - actions["begin"]).astype(np.float64)
    return took


def _compare(per_rank: Sequence[Array], shortened: Sequence[Floats]) -> tuple[Floats, Floats] | None:
    """Return by how much the actions of each step, and its window, get shorter; None without a replay."""
    steps: Column = distinct(per_rank[0]["step"])
    for actions in per_rank[1:]:
        steps = np.intersect1d(steps, actions["step"])
    sorted_by_step = [np.argsort(actions["step"], kind="stable") for actions in per_rank]
    ordered: Sequence[Array] = [actions[order] for actions, order in zip(per_rank, sorted_by_step, strict=True)]
    acts = [np.stack([actions[name] for name in Act._fields], axis=1) for actions in ordered]
    took_before = [_took(actions) for actions in ordered]
    took_after = [took[order] for took, order in zip(shortened, sorted_by_step, strict=True)]
    bounds = [np.searchsorted(actions["step"], (steps, steps + 1)).T.tolist() for actions in ordered]
    # Most steps have the same actions in the same order: these are replayed together, a column each.
    alike: dict[tuple[bytes, ...], tuple[Sequence[Array], list[Floats], list[Floats]]] = {}
    for of_step in zip(*bounds, strict=True):
        rows = [slice(*bound) for bound in of_step]
        plan = tuple(own[some].tobytes() for own, some in zip(acts, rows, strict=True))
        if plan not in alike:
            alike[plan] = [actions[some] for actions, some in zip(ordered, rows, strict=True)], [], []
        _, before, after = alike[plan]
        before.append(np.concatenate([took[some] for took, some in zip(took_before, rows, strict=True)]))
        after.append(np.concatenate([took[some] for took, some in zip(took_after, rows, strict=True)]))
    saved, gained = [], []
    for orders, before, after in alike.values():
        took = np.stack((*before, *after), axis=1)
        windows = replay_windows(orders, took)
        if windows is None:
            return None
        saved.append(took[:, : len(before)].sum(axis=0) - took[:, len(before) :].sum(axis=0))
        gained.append(windows[: len(before)] - windows[len(before) :])
    return (np.concatenate(saved), np.concatenate(gained)) if saved else None
