"""Causes of bubbles, by replay: the actions of a pipeline in the order in which its ranks ran them.

Steps in which all ranks act in the same order, also those of other replicas, are replayed side by side.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dtprof.columns import begins_of, is_among, mean_of_each, number_distinct
from dtprof.intervals import Column, Floats
from dtprof.records.tables import Array, join, select

FORWARD, LOSS, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(5)
GRADIENT = (BACKWARD, BACKWARD_INPUT)
"""Actions that send a gradient to the stage before."""
PARTS = ("schedule", "imbalance", "exposed_p2p", "jitter")
_MAX_DURATIONS = 1 << 20
"""Of actions that are replayed side by side: times three, 24 MB."""
_MAX_ROWS = 1 << 17
"""Actions of pipelines that are gone through in one go."""
_KINDS = 8
"""No fewer than there are."""
_DURATIONS = 3
"""Of each action: equal for all stages, the mean of its stage, its own."""


class Act(NamedTuple):
    """One action of a rank."""

    kind: int
    stage: int
    microbatch: int


SchedulePlan = tuple[tuple[Act, ...], ...]
"""The actions of each rank, in order."""
Needed = tuple[bool, int, int]
"""The dependency of an action: a forward pass or a gradient, of which stage and microbatch."""


def split_bubbles(pipelines: Iterable[tuple[Sequence[Array], Column]]) -> dict[str, float] | None:
    """Return the mean of each part over the steps that can be replayed, as shares of their windows.

    Parameters:
        pipelines: of each the actions of its ranks, by begin, and the steps to look at.

    Returns:
        None where no step can be replayed. The parts sum to the mean bubble of the steps replayed.
    """
    total, count = np.zeros(len(PARTS)), 0
    waiting: dict[SchedulePlan, list[tuple[Floats, float]]] = {}
    plans: dict[tuple[bytes, bytes], SchedulePlan] = {}
    for some in _some_at_once(pipelines):
        for plan, durations, bubble in _list_steps(some, plans):
            alike = waiting.setdefault(plan, [])
            alike.append((durations, bubble))
            if durations.size * len(alike) > _DURATIONS * _MAX_DURATIONS:
                done, replayed = _split(plan, waiting.pop(plan))
                total, count = total + done, count + replayed
    for plan, alike in waiting.items():
        done, replayed = _split(plan, alike)
        total, count = total + done, count + replayed
    return dict(zip(PARTS, (total / count).tolist(), strict=True)) if count else None


class _Acted(NamedTuple):
    """Actions of the ranks of one pipeline in the replayed steps, one rank after the other."""

    actions: Array
    lengths: list[int]  # how many are of each rank


def _some_at_once(pipelines: Iterable[tuple[Sequence[Array], Column]]) -> Iterator[list[_Acted]]:
    """Yield pipelines, several in one go; without those in which a rank did nothing."""
    waiting: list[_Acted] = []
    num_rows = 0
    for per_rank, steps in pipelines:
        actions = join(per_rank)
        chosen = is_among(actions["step"], steps)
        before = np.concatenate(([0], np.cumsum(chosen)))
        lengths = np.diff(before[np.cumsum([0, *map(len, per_rank)])]).tolist()
        if not all(lengths):
            continue
        waiting.append(_Acted(select(actions, chosen), lengths))
        num_rows += len(waiting[-1].actions)
        if num_rows > _MAX_ROWS:
            yield waiting
            waiting, num_rows = [], 0
    if waiting:
        yield waiting


def _list_steps(
    pipelines: Sequence[_Acted], plans: dict[tuple[bytes, bytes], SchedulePlan]
) -> Iterator[tuple[SchedulePlan, Floats, float]]:
    """Yield the plan of each step of these pipelines, its durations of shape (actions, 3), and its bubble."""
    everything = join([acted.actions for acted in pipelines])
    sizes = [len(acted.lengths) for acted in pipelines]
    pipeline = np.repeat(np.arange(len(pipelines)), [len(acted.actions) for acted in pipelines])
    member = np.repeat(
        np.concatenate([np.arange(size) for size in sizes]), [length for acted in pipelines for length in acted.lengths]
    )
    took = (everything["end"] - everything["begin"]).astype(np.float64)
    kind = everything["kind"]
    durations = np.stack(
        (
            np.where(kind == LOSS, 0.0, _mean_by(pipeline * _KINDS + kind, took)),
            _mean_by((pipeline * _KINDS + kind) * 2**32 + everything["stage"], took),
            took,
        ),
        axis=1,
    )
    # Step by step of each pipeline, and of each rank in its order.
    order = np.lexsort((member, everything["step"], pipeline))
    durations, took, member = durations[order], took[order], member[order]
    step, pipeline = everything["step"][order], pipeline[order]
    acts = np.ascontiguousarray(np.stack([everything[name][order] for name in Act._fields], axis=1))
    begins = np.flatnonzero(begins_of(step, pipeline))
    bounds = [*begins.tolist(), len(step)]
    windows = np.maximum.reduceat(everything["end"][order], begins) - np.minimum.reduceat(
        everything["begin"][order], begins
    )
    busy = np.add.reduceat(took, begins)
    most = max(sizes)
    which = np.repeat(np.arange(len(begins)), np.diff(bounds))
    lengths = np.bincount(which * most + member, minlength=len(begins) * most).reshape(-1, most)
    size_of_step = np.array(sizes)[pipeline[begins]].tolist()
    for number, size in enumerate(size_of_step):
        window = int(windows[number])
        if window <= 0:
            continue
        some = slice(bounds[number], bounds[number + 1])
        key = acts[some].tobytes(), lengths[number, :size].tobytes()
        if key not in plans:
            rows = iter(acts[some].tolist())
            plans[key] = tuple(
                tuple(Act(*row) for row in itertools.islice(rows, length)) for length in lengths[number, :size].tolist()
            )
        yield plans[key], durations[some], 1 - float(busy[number]) / (size * window)


def _mean_by(keys: Column, values: Floats) -> Floats:
    _, place = number_distinct(keys)
    return mean_of_each(place, values)[place]


def _split(plan: SchedulePlan, alike: Sequence[tuple[Floats, float]]) -> tuple[Floats, int]:
    """Return the sum of the parts over steps of one plan, and how many could be replayed."""
    replayed = replay(plan, np.concatenate([durations for durations, _ in alike], axis=1))
    if replayed is None:
        return np.zeros(len(PARTS)), 0
    schedule, uneven, jittered = replayed.reshape(len(alike), _DURATIONS).T
    bubble = np.array([real for _, real in alike])
    parts = np.stack((schedule, uneven - schedule, bubble - jittered, jittered - uneven))
    return parts.sum(axis=1), len(alike)


def replay(plan: SchedulePlan, took: Floats, *, message_ns: float = 0.0) -> Floats | None:
    """Return the share of bubbles of each replay; None where there is none.

    Parameters:
        message_ns: how long activations and gradients are on their way from rank to rank.
    """
    windows, busy = replay_plan(plan, took, message_ns=message_ns), took.sum(axis=0)
    if windows is None or not busy.all():
        return None
    share: Floats = 1 - busy / (len(plan) * windows)
    return share


def replay_windows(per_rank: Sequence[Array], took: Floats) -> Floats | None:
    """Return how long each replay of the actions of one step is; None where they cannot be replayed."""
    return replay_plan(tuple(map(list_acts, per_rank)), took)


def replay_plan(plan: SchedulePlan, took: Floats, *, message_ns: float = 0.0) -> Floats | None:
    """Return how long each replay of a plan is, given durations rank by rank; None where it cannot be replayed."""
    found = replay_actions(plan, took, message_ns=message_ns)
    return None if found is None else _window(*found)


def list_acts(actions: Array) -> tuple[Act, ...]:
    """Return the actions of one rank in one step, in their order."""
    return tuple(Act(*act) for act in zip(*(actions[name].tolist() for name in Act._fields), strict=True))


def replay_actions(plan: SchedulePlan, took: Floats, *, message_ns: float = 0.0) -> tuple[Floats, Floats] | None:
    """Return begin and end of each action when ranks run them in order, each as soon as its dependencies have ended.

    None where the actions wait for each other or for one that is missing.

    Parameters:
        took: durations of the actions, rank by rank; one column a replay.
    """
    order = in_order(plan)
    if not order:
        return None
    first_row = np.cumsum([0, *map(len, plan)]).tolist()
    ready: dict[Needed, tuple[int, Floats]] = {}  # on which rank, and when
    now = np.zeros((len(plan), took.shape[1]))
    begins, ends = np.zeros((2, *took.shape))
    for rank, at, needs, gives in order:
        row = first_row[rank] + at
        begin = now[rank]
        if needs is not None:
            source, there = ready[needs]
            begin = np.maximum(begin, there if source == rank else there + message_ns)
        begins[row] = begin
        ends[row] = begin + took[row]
        now[rank] = ends[row]
        if gives is not None:
            ready[gives] = rank, ends[row]
    return begins, ends


def _window(begins: Floats, ends: Floats) -> Floats:
    """Return how long each replay is."""
    window: Floats = ends.max(axis=0) - begins.min(axis=0)
    return window


def in_order(plan: Sequence[Sequence[Act]]) -> list[tuple[int, int, Needed | None, Needed | None]] | None:
    """Return the actions of all ranks in a topological order; None where there is none.

    A forward needs that of the stage before; a gradient of inputs that of the stage after, in the same microbatch. Each
    is given as its rank, its position there, what it needs and what it gives.
    """
    last_stage = max((act.stage for acts in plan for act in acts), default=0)
    given: set[Needed] = set()
    at = [0] * len(plan)
    order: list[tuple[int, int, Needed | None, Needed | None]] = []
    moved = True
    while moved:
        moved = False
        for rank, acts in enumerate(plan):
            while at[rank] < len(acts):
                kind, stage, microbatch = acts[at[rank]]
                needs = gives = None
                if kind == FORWARD and stage > 0:
                    needs = (True, stage - 1, microbatch)
                elif kind in GRADIENT and stage < last_stage:
                    needs = (False, stage + 1, microbatch)
                if needs is not None and needs not in given:
                    break
                if kind == FORWARD or kind in GRADIENT:
                    gives = (kind == FORWARD, stage, microbatch)
                    given.add(gives)
                order.append((rank, at[rank], needs, gives))
                at[rank] += 1
                moved = True
    return order if all(done == len(acts) for done, acts in zip(at, plan, strict=True)) else None


def mean_parts(parts: Mapping[str, float] | None, fraction: float) -> dict[str, float] | None:
    """Return parts that sum to the bubble; exposed_p2p takes the difference of the steps that were not replayed."""
    if parts is None:
        return None
    return dict(parts) | {"exposed_p2p": parts["exposed_p2p"] + fraction - sum(parts.values())}
