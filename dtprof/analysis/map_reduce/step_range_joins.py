"""Join what was found of several ranges of steps, each read by itself: of a long run, and of one that goes on."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from dtprof.analysis.communication.bucket_reductions import add_bucket_sums
from dtprof.analysis.communication.exchange_balance import join_exchanges
from dtprof.analysis.communication.serialised_collectives import SerialKey, SerialSums
from dtprof.analysis.critical_path.longest_path import join_paths
from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.map_reduce.rank_sums import RankReduction
from dtprof.analysis.memory.rank_memory import find_categories, find_peak
from dtprof.analysis.pipeline.bubbles import RankPipeline, keep_some_actions
from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.analysis.steps.throughput import RankConsumption, Sharing
from dtprof.analysis.stragglers.rank_waits import RankWaits
from dtprof.intervals import Column

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class OfRange(Generic[Found]):
    """What was found of a range of steps."""

    first: int  # number of a step
    last: int
    found: Found


def join_steps(parts: Sequence[OfRange[RankSteps]], newest: RankSteps) -> RankSteps:
    """Return the steps of a rank; `newest` says how many there are."""
    inside = [part.found.between(part.first, part.last) for part in parts]
    return replace(
        newest,
        numbers=np.concatenate([newest.numbers[:0], *(numbers for numbers, _ in inside)]),
        windows=np.concatenate([newest.windows[:0], *(windows for _, windows in inside)]),
        threads=tuple(sorted({thread for part in parts for thread in part.found.threads})),
        traced=tuple(sorted({span for part in parts for span in part.found.traced})),
    )


def join_pipelines(parts: Sequence[OfRange[RankPipeline]], *, world_size: int) -> RankPipeline:
    """Return the actions of a rank in the pipeline that it was in last."""
    newest = parts[-1].found
    alike = [part for part in parts if part.found.key == newest.key]
    chosen = [(one.found, (one.found.steps >= one.first) & (one.found.steps <= one.last)) for one in alike]
    actions = [
        one.found.actions[(one.found.actions["step"] >= one.first) & (one.found.actions["step"] <= one.last)]
        for one in alike
    ]

    def column(name: str) -> Any:
        return np.concatenate([getattr(own, name)[inside] for own, inside in chosen])

    joined = replace(
        newest,
        steps=column("steps"),
        first=column("first"),
        last=column("last"),
        busy=column("busy"),
        fill=column("fill"),
        actions=np.concatenate(actions),
    )
    return keep_some_actions(joined, world_size)


def join_consumption(parts: Sequence[OfRange[RankConsumption]]) -> RankConsumption:
    """Return the consumption of a rank in all these steps."""
    steps = np.concatenate([np.arange(part.first, part.last + 1) for part in parts])
    values = np.concatenate(
        [
            np.stack(
                [part.found.at(np.arange(part.first, part.last + 1), i) for i in range(part.found.values.shape[1])],
                axis=1,
            )
            for part in parts
        ]
    )
    changes = np.flatnonzero(np.concatenate(([True], (values[1:] != values[:-1]).any(axis=1))))
    return RankConsumption(
        steps=steps[changes],
        values=values[changes],
        unclear=frozenset[Sharing]().union(*(part.found.unclear for part in parts)),
        features=frozenset[str]().union(*(part.found.features for part in parts)),
    )


def join_reductions(parts: Sequence[tuple[int, RankReduction]]) -> RankReduction:
    """Return one reduction of a rank, given those of several ranges in order, and the bins of steps before each.

    The growth of memory is that of the newest.
    """
    reductions = [own for _, own in parts]
    newest = reductions[-1]
    stepping = [(before, own) for before, own in parts if own.num_steps]
    totals = [own.parts_ns for _, own in stepping if own.parts_ns is not None]
    waits = [(before, own.waits) for before, own in stepping if own.waits is not None]
    paths = [own.path for own in reductions if own.path is not None]
    is_seen = bool(stepping) and len(totals) == len(stepping)
    serialised: dict[SerialKey, SerialSums] = {}
    for own in reductions:
        for key, sums in own.serialised.items():
            known = serialised.get(key, SerialSums(0, 0, 0, 0, 0))
            serialised[key] = SerialSums(*(a + b for a, b in zip(known, sums, strict=True)))
    return replace(
        newest,
        num_steps=sum(own.num_steps for own in reductions),
        steps_ns=sum(own.steps_ns for own in reductions),
        parts_ns=_sum_named(totals) if is_seen else None,
        newest_parts_ns=stepping[-1][1].newest_parts_ns if is_seen else None,
        all_phases_ns=_sum_named([own.all_phases_ns for own in reductions]),
        all_user_phases_ns=_sum_named([own.all_user_phases_ns for own in reductions]),
        num_events=sum(own.num_events for own in reductions),
        waits=_join_waits(waits) if is_seen and len(waits) == len(stepping) else None,
        path=join_paths(paths) if is_seen and paths else None,
        bars=next((own.bars for own in reversed(reductions) if own.bars is not None), None),
        unobserved=sum(own.unobserved for own in reductions),
        unmatched=sum(own.unmatched for own in reductions),
        estimated=sum(own.estimated for own in reductions),
        not_known=sum(own.not_known for own in reductions),
        mixed=sum(own.mixed for own in reductions),
        uncertain=sum(own.uncertain for own in reductions),
        impossible=sum(own.impossible for own in reductions),
        most_impossible_ns=max(own.most_impossible_ns for own in reductions),
        clock_errors_ns=sum(own.clock_errors_ns for own in reductions),
        serialised=serialised,
        buckets=functools.reduce(add_bucket_sums, (own.buckets for own in reductions)),
        exchanges=join_exchanges(own.exchanges for own in reductions),
    )


def _join_waits(parts: Sequence[tuple[int, RankWaits]]) -> RankWaits:
    """Return the waits of a rank over all these bins, which ranges may share."""
    num_bins = max(before + len(own.steps) for before, own in parts)

    def column(name: str) -> Column:
        total = np.zeros(num_bins, np.int64)
        for before, own in parts:
            values = getattr(own, name)
            total[before : before + len(values)] += values
        return total

    bins = np.concatenate([own.bins + before for before, own in parts])
    culprits = np.concatenate([own.culprits for _, own in parts])
    keys, at = np.unique(bins << 32 | culprits, return_inverse=True)
    waited = np.zeros(len(keys), np.int64)
    np.add.at(waited, at.reshape(-1), np.concatenate([own.waited for _, own in parts]))
    return RankWaits(
        rank=parts[0][1].rank,
        steps=column("steps"),
        work=column("work"),
        blocked=column("blocked"),
        unclear=column("unclear"),
        phases=sum((own.phases for _, own in parts), np.zeros_like(parts[0][1].phases)),
        bins=keys >> 32,
        culprits=keys & 0xFFFFFFFF,
        waited=waited,
    )


def _sum_named(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for own in parts:
        total.update(own)
    return dict(total)


def join_facts(known: RankFacts, newest: RankFacts) -> RankFacts:
    """Return the facts of a rank, given those of two stretches of its log, the later one second."""
    largest = join_largest(known.memory_bytes, newest.memory_bytes)
    return replace(
        newest,
        last_ns=max(known.last_ns, newest.last_ns),
        events=known.events + newest.events,
        memory_bytes=largest,
        peak_bytes=find_peak(largest),
        memory_categories=find_categories(largest),
        unsound=known.unsound + newest.unsound,
        device_error_ns=newest.device_error_ns if newest.device_error_ns is not None else known.device_error_ns,
        polled=known.polled + newest.polled,
        graph_replays=known.graph_replays + newest.graph_replays,
        skipped_marks=max(known.skipped_marks, newest.skipped_marks),
        captured_marks=max(known.captured_marks, newest.captured_marks),
    )


def join_largest(known: Mapping[str, int], newest: Mapping[str, int]) -> dict[str, int]:
    """Return the largest value of each sample."""
    largest = dict(known)
    for name, value in newest.items():
        largest[name] = max(value, largest.get(name, value))
    return largest
