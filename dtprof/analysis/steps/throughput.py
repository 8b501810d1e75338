"""How many tokens and samples the job consumes a second.

Each rank tells what its model is given in a step. Ranks of one tensor-parallel or pipeline group work on the same
sequences: of them the one that was given most counts. All others add up: data-parallel ranks have sequences of their
own, context-parallel ones each a part of theirs, and so the same samples.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.results import Caveat, Throughput
from dtprof.analysis.steps.parameter_exchanges import find_parameter_messages
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps
from dtprof.columns import distinct, is_any
from dtprof.formatting import format_rate, list_ranks
from dtprof.intervals import Column, Floats, Mask
from dtprof.job.axes import SAME_SAMPLES, SAME_TOKENS, find_replicas, is_clear
from dtprof.records import events
from dtprof.records.tables import UNKNOWN_NS, Array, Group, RankTables, select

_ALL_TO_ALL = "all_to_all"
_EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", _ALL_TO_ALL)
"""Collectives by which activations are exchanged; a broadcast distributes buffers."""
TOKENS_PER_S = "tokens_per_s"
RATES = {TOKENS_PER_S: "tokens/s", "samples_per_s": "samples/s"}
"""A rate of consumption and its unit."""
WORTH_MEAN = 0.1
"""The mean rate is said beside the median where it differs by more."""
_NO_STEP = "no training forward pass of a model was recorded in the steps; dtprof.step(tokens=N) says what is consumed"
_NONE_OF_IT = {
    "tokens_per_s": "no model was given token ids (integers, batch by sequence); dtprof.step(tokens=N) says how many",
    "samples_per_s": "no model was given a tensor, whose first dimension would be the batch",
}


LOST = "the log of {} is missing or damaged"
"""Begin of the reason why a figure of all ranks is not known."""
_NO_SAMPLES = {
    events.SEQUENCE_FIRST: "the model has layers of torch.nn with batch_first=False, and nothing else says which "
    "dimension of its token ids is the batch",
    events.PACKED: "the model is given one row of token ids with position_ids and no mask, which may hold several "
    "sequences",
}
"""Why samples are not known, by what the job uses."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Ranks that exchange activations along no known axis: they may work on the same sequences."""

    group: str
    ranks: tuple[int, ...]
    how: str  # what they do: "all_reduce in the forward pass", "messages"
    tokens: bool = True  # they may be given the same tokens, not only parts of the same samples


@dataclass(frozen=True, kw_only=True)
class RankConsumption:
    """The consumption of one rank per step: each value holds from its step up to the next one listed."""

    steps: Column
    values: Column  # tokens and samples: a row for each of them
    unclear: frozenset[Sharing] = frozenset()
    features: frozenset[str] = frozenset()  # of _NO_SAMPLES, those that its models have

    def at(self, numbers: Column, column: int) -> Column:
        """Return tokens, column 0, or samples, 1, of each step; 0 before the first that is known."""
        held = np.concatenate(([0], self.values[:, column]))
        held_at: Column = held[np.searchsorted(self.steps, numbers, "right")]
        return held_at


@dataclass(frozen=True, kw_only=True)
class JobConsumption:
    """Consumption of the whole job in each of some steps, by rate: the known ones of RATES."""

    of_steps: Mapping[str, Floats]
    silent: Mapping[str, Sequence[int]]  # ranks whose replica was given none of it
    unknown: Mapping[str, str]  # why the others are not known


def find_consumption(tables: RankTables, own: RankSteps) -> RankConsumption | None:
    """Return the consumption of a rank step by step; None where neither it nor a forward pass was recorded."""
    if not len(own.numbers) or not len(tables.samples):
        return None
    taken = [samples_of(tables, name) for name in events.CONSUMED]
    values = np.stack([_held(rows, own.windows[:, 1], taken) for rows in taken], axis=1)
    if not values.any() and events.FORWARD not in tables.ops:
        return None
    changes = np.flatnonzero(np.concatenate(([True], (values[1:] != values[:-1]).any(axis=1))))
    return RankConsumption(
        steps=own.numbers[changes],
        values=values[changes],
        unclear=_find_unclear(tables, own),
        features=frozenset(tables.features) & _NO_SAMPLES.keys(),
    )


def _find_unclear(tables: RankTables, own: RankSteps) -> frozenset[Sharing]:
    """Return the ranks with which a rank exchanges activations, where no axis says which data these ranks share.

    Collectives inside training forward passes that no framework issues may be those of hand-written tensor parallelism,
    messages between steps those of a hand-written pipeline.
    """
    groups = {number: group for number, group in tables.groups.items() if not is_clear(group) and len(group.ranks) > 1}
    operations = tables.operations
    if not groups or not len(operations):
        return frozenset()
    chosen = is_any(operations["group"], list(groups))
    messages = is_any(operations["op"], [i for i, op in enumerate(tables.ops) if op in ("send", "recv")])
    messages &= ~find_parameter_messages(tables, operations, own)
    exchanged = is_any(operations["op"], [i for i, op in enumerate(tables.ops) if op in _EXCHANGES])
    windows = own.windows
    found = set()
    for row in operations[chosen & messages & _is_inside(operations["issued_ns"], windows)]:
        group, peer = groups[int(row["group"])], int(row["peer"])
        if 0 <= peer < len(group.ranks):
            found.add(Sharing(group=group.name, ranks=(tables.rank, group.ranks[peer]), how="messages"))
    forward = tables.ops.index(events.FORWARD) if events.FORWARD in tables.ops else -1
    spans = tables.spans[(tables.spans["op"] == forward) & (tables.spans["end_ns"] != UNKNOWN_NS)]
    passes = np.stack([spans["begin_ns"], spans["end_ns"]], axis=1)
    inside = operations[chosen & exchanged & _is_inside(operations["issued_ns"], passes)]
    for number, op, at in distinct(inside[["group", "op", "site"]]).tolist():
        site = tables.sites.get(at)
        if site is None or site.label is None or site.label.api in ("dtensor", "tp"):
            group, how = groups[number], f"{tables.ops[op]} in the forward pass"
            # Experts and layers parallel along the sequence exchange all_to_all what each rank has of its own.
            has_own = tables.ops[op] == _ALL_TO_ALL and (site is None or site.label is None)
            found.add(Sharing(group=group.name, ranks=tuple(group.ranks), how=how, tokens=not has_own))
    return frozenset(found)


def _is_inside(times: Column, intervals: Column) -> Mask:
    """Say which times lie in one of these intervals, which are sorted and do not overlap."""
    if not len(intervals):
        return np.zeros(len(times), np.bool_)
    place = np.searchsorted(intervals[:, 0], times, "right") - 1
    inside: Mask = (place >= 0) & (times < intervals[np.maximum(place, 0), 1])
    return inside


def samples_of(tables: RankTables, name: str) -> Array:
    """Return the samples of this name."""
    return select(tables.samples, is_any(tables.samples["op"], [i for i, op in enumerate(tables.ops) if op == name]))


def _held(rows: Array, ends: Column, taken: Sequence[Array]) -> Column:
    """Return the value that holds at each of these times: samples are taken where it changes, and now and then again.

    Before the first sample that is left, older ones may have been dropped: then the same held, most likely. Where the
    other sample was taken earlier, they were not.
    """
    if not len(rows):
        return np.zeros(len(ends), np.int64)
    is_first = int(rows["step"][0]) <= min(int(other["step"][0]) for other in taken if len(other))
    before = rows["value"][:1] if is_first else np.zeros(1, np.int64)
    held: Column = np.concatenate((before, rows["value"]))[np.searchsorted(rows["t_ns"], ends, "right")]
    return held


def measure_throughput(
    steps: Mapping[int, RankSteps],
    consumed: Mapping[int, RankConsumption],
    groups: Collection[Group],
    measured: MeasuredSteps,
    *,
    incomplete: Collection[int],
) -> tuple[Throughput | None, list[Caveat]]:
    """Return the throughput of the measured steps, and its caveats.

    Parameters:
        groups: each once. incomplete: ranks whose log is missing or damaged.
    """
    if not measured.known:
        return None, []  # what is said of the steps says it
    numbers = np.arange(measured.first, measured.last + 1)
    consumption = sum_consumption(steps, consumed, groups, numbers, incomplete=incomplete)
    caveats = [Caveat(name, why) for name, why in consumption.unknown.items()]
    if not consumption.of_steps:
        return None, caveats
    first = next(iter(consumption.of_steps))
    unnamed = [group for group in groups if group.axis is None and 1 < len(group.ranks) < len(steps)]
    caveats += _of_sum(first, [rank for rank in consumption.silent[first] if steps[rank].count], unnamed)
    step_s = _durations(steps.values(), numbers) / 1e9
    tokens, samples = (consumption.of_steps.get(name, np.zeros(0)) for name in RATES)
    tokens_per_s, samples_per_s = (values / step_s if len(values) else values for values in (tokens, samples))
    # Optimizers that step in turn (actor and critic, a GAN) make steps without a forward pass: a median would be 0.
    idle = max(np.count_nonzero(values[np.argmax(values > 0) :] == 0) for values in (tokens, samples) if len(values))
    middle = _mean_ratio if idle else _median_ratio
    if idle:
        caveats.append(
            Caveat(first, f"{idle} of {len(numbers)} steps were given none: the mean is shown, not the median")
        )
    return (
        Throughput(
            tokens_per_s=middle(tokens, step_s),
            samples_per_s=middle(samples, step_s),
            tokens_per_step=middle(tokens),
            samples_per_step=middle(samples),
            mean_tokens_per_s=_over_time(tokens, step_s),
            mean_samples_per_s=_over_time(samples, step_s),
            first_step=measured.first,
            tokens_per_s_of_steps=tuple(tokens_per_s.tolist()),
            samples_per_s_of_steps=tuple(samples_per_s.tolist()),
        ),
        caveats,
    )


def describe_mean_rate(throughput: Throughput) -> str:
    """Return the mean rate of tokens, else of samples, where rare long steps set it apart from the median; or ''."""
    known = throughput.tokens_per_s is not None
    what = "tokens" if known else "samples"
    middle, mean = (
        (throughput.tokens_per_s, throughput.mean_tokens_per_s)
        if known
        else (throughput.samples_per_s, throughput.mean_samples_per_s)
    )
    if not middle or mean is None or abs(mean / middle - 1) < WORTH_MEAN:
        return ""
    return f"over the time of all measured steps {format_rate(mean)} {what}/s"


def sum_consumption(
    steps: Mapping[int, RankSteps],
    consumed: Mapping[int, RankConsumption],
    groups: Collection[Group],
    numbers: Column,
    *,
    incomplete: Collection[int],
) -> JobConsumption:
    """Return the consumption of the job per step: the maximum over ranks that share data, then the sum."""
    recorded = {rank: consumed[rank] for rank, rank_steps in steps.items() if rank_steps.count and rank in consumed}
    of_steps: dict[str, Floats] = {}
    silent: dict[str, list[int]] = {}
    unclear: dict[str, str] = {}
    for column, (name, axes) in enumerate(zip(RATES, (SAME_TOKENS, SAME_SAMPLES), strict=True)):
        replicas = find_replicas({*steps, *incomplete}, groups, axes)
        total, without = _sum_replicas(recorded, column, replicas, numbers)
        if not total.any():
            continue
        if lost := [rank for rank in without if rank in incomplete]:
            unclear[name] = f"{LOST.format(list_ranks(lost))}, and no other rank is known to have been given the same"
        elif sharing := _find_between(replicas, recorded.values(), tokens=name == TOKENS_PER_S):
            unclear[name] = _ask_axis(sharing)
        else:
            of_steps[name], silent[name] = total, without
    features = {feature for own in recorded.values() for feature in own.features}
    for feature, why in _NO_SAMPLES.items():
        if feature in features and "tokens_per_s" in of_steps:
            unclear.setdefault("samples_per_s", why)
    unknown = {
        name: unclear.get(name) or (_NONE_OF_IT[name] if recorded or unclear else _NO_STEP)
        for name in RATES
        if name not in of_steps
    }
    return JobConsumption(of_steps=of_steps, silent=silent, unknown=unknown)


def _find_between(
    replicas: Iterable[Sequence[int]], recorded: Iterable[RankConsumption], *, tokens: bool
) -> Sharing | None:
    """Return ranks of several replicas that may work on the same sequences, or tokens; None where there are none."""
    replica_of = {rank: number for number, replica in enumerate(replicas) for rank in replica}
    every = {sharing for own in recorded for sharing in own.unclear if sharing.tokens or not tokens}
    for sharing in sorted(every, key=lambda sharing: (sharing.group, sharing.ranks, sharing.how)):
        if len({replica_of[rank] for rank in sharing.ranks if rank in replica_of}) > 1:
            return sharing
    return None


def _ask_axis(sharing: Sharing) -> str:
    if sharing.how == "messages":
        return (
            f"{list_ranks(sorted(sharing.ranks))} send each other messages, and nothing says whether they are stages "
            "of a pipeline, which work on the same sequences; a dimension `pp` of a DeviceMesh with their group says so"
        )
    if not sharing.tokens:
        return (
            f"nothing says what group {sharing.group!r} is for, and its ranks {sharing.how}: each may be given a part "
            "of the same samples; a dimension `ep` or `sp` of a DeviceMesh with this group says what they share"
        )
    return (
        f"nothing says what group {sharing.group!r} is for, and its ranks {sharing.how}: they may be tensor-parallel, "
        "and work on the same sequences; a dimension `dp` or `tp` of a DeviceMesh with this group says what they share"
    )


def _median_ratio(values: Floats, of: Floats | float = 1.0) -> float | None:
    """Return the median ratio."""
    return float(np.nanmedian(values / of)) if len(values) else None


def _mean_ratio(values: Floats, of: Floats | float = 1.0) -> float | None:
    """Return the ratio of the sums, from one step that consumes up to the last one: of whole cycles of optimizers."""
    consuming = np.flatnonzero(values)
    if not len(consuming):
        return None
    cycles = slice(consuming[0], consuming[-1] if len(consuming) > 1 else None)
    counted, divisor = values[cycles], np.broadcast_to(of, values.shape)[cycles]
    known = ~np.isnan(divisor)
    return float(counted[known].sum() / divisor[known].sum()) if known.any() else None


def _over_time(values: Floats, step_s: Floats) -> float | None:
    """Return all that steps of known duration consumed, over their time."""
    known = ~np.isnan(step_s)
    return float(values[known].sum() / step_s[known].sum()) if len(values) and known.any() else None


def _sum_replicas(
    recorded: Mapping[int, RankConsumption], column: int, replicas: Iterable[Sequence[int]], numbers: Column
) -> tuple[Floats, list[int]]:
    """Return the sum over replicas of the most that any of its ranks was given, and the ranks of those without."""
    total = np.zeros(len(numbers))
    without: list[int] = []
    for replica in replicas:
        most = np.zeros(len(numbers))
        for rank in replica:
            if rank in recorded:
                most = np.maximum(most, recorded[rank].at(numbers, column))
        total += most
        if not most.any():
            without += replica
    return total, without


def _durations(steps: Iterable[RankSteps], numbers: Column) -> Floats:
    """Return how long each step took, mean over the ranks that have it; nan where none has."""
    total, present = np.zeros(len(numbers)), np.zeros(len(numbers))
    for rank in steps:
        place, windows = rank.between(int(numbers[0]), int(numbers[-1]))
        total[place - numbers[0]] += windows[:, 1] - windows[:, 0]
        present[place - numbers[0]] += 1
    mean: Floats = np.divide(total, present, out=np.full(len(numbers), np.nan), where=present > 0)
    return mean


def _of_sum(name: str, silent: Sequence[int], unnamed: Sequence[Group]) -> list[Caveat]:
    caveats = []
    if silent:
        caveats.append(Caveat(name, f"the models of {list_ranks(silent)} were given none; they count as 0"))
    if unnamed:
        names = f"group {unnamed[0].name!r}" + (f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else "")
        caveats.append(
            Caveat(
                name,
                f"nothing says what {names} is for; ranks of it are taken to have sequences of their own, which "
                "tensor-parallel ones have not",
            )
        )
    return caveats
