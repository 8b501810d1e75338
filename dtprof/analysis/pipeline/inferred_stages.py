"""Stages of pipelines that a program wrote itself, inferred from the messages of its ranks and their passes.

No framework says what such a rank does. Its actions are the forward and backward passes that it recorded. A rank from
which it receives what a forward pass takes is the stage before it, one from which it receives what a backward pass
takes the stage after it. Microbatches are numbered in the order of the passes. Where anything does not fit, such as
passes that communicate themselves, passes without messages, or ranks in a ring, no stage is inferred, with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtprof.analysis.pipeline.schedule_replay import BACKWARD, FORWARD
from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.columns import distinct, is_any
from dtprof.formatting import list_ranks
from dtprof.intervals import Column, Intervals, Mask, locate, pair
from dtprof.job.valid_records import spans_of_any
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, Pipeline, RankTables

PASSES = (events.FORWARD, events.BACKWARD)
SCHEDULES = ("GPipe", "1F1B")
"""Schedules that are recognised by the order of passes."""
BY_HAND = "of its own"
"""The name of a schedule in any other order."""
NO_PASSES = "its forward passes were not recorded: its layers are not called through one module"
UNEQUAL = "a step has {forwards} forward and {backwards} backward passes, which are not of as many microbatches each"
UNSTEADY = "its steps have different numbers of passes"
INSIDE = "its passes exchange messages themselves"
AMBIGUOUS = (
    "it receives what its forward passes take from {previous}, and what its backward passes take from {following}"
)
SEVERAL = (
    "it receives what its forward passes and what its backward passes take from {both}, as where several stages lie on "
    "each rank, and nothing says which stage a pass is of"
)
NO_MESSAGES = "none of its passes begins with a message"
NOT_FED = "some of its passes begin without a message from the stage whose output they would take"
NOT_A_CHAIN = "messages do not join ranks to a chain of stages"


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward passes of one rank that may be actions of a pipeline, by begin."""

    begin: Column
    end: Column
    kind: Column  # FORWARD, BACKWARD

    @property
    def times(self) -> Intervals:
        """Begin and end of each."""
        return pair(self.begin, self.end)


@dataclass(frozen=True, kw_only=True)
class InferredStage:
    """What one rank tells of its place in a pipeline."""

    previous: int | None  # rank; None: it is the first stage
    following: int | None
    microbatches: int
    passes: Passes
    number: Column  # of the microbatch of each pass


def find_passes(tables: RankTables, spans: Array, operations: Array) -> Passes:
    """Return the outermost passes of a rank, the loss with the forward pass before it.

    The loss runs between a forward and a backward pass, where the rank issues, waits for and receives nothing.
    """
    ended = spans_of_any(spans, tables, PASSES, (codes.DONE,))
    begin, end = ended["begin_ns"], ended["end_ns"].copy()
    # A pass inside another, as with reentrant checkpoints, is part of it.
    reach = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], end)))[:-1]
    outermost = begin >= reach
    backward = [number for number, name in enumerate(tables.ops) if name == events.BACKWARD]
    begin, end = begin[outermost], end[outermost]
    kind = np.where(is_any(ended["op"], backward)[outermost], BACKWARD, FORWARD)
    busy = [operations[name] for name in ("issued_ns", "wait_begin_ns", "done_ns")]
    times = np.sort(np.concatenate([column[column != UNKNOWN_NS] for column in busy]))
    if len(begin) > 1:
        nothing = np.searchsorted(times, begin[1:]) == np.searchsorted(times, end[:-1])
        has_loss = np.append((kind[:-1] == FORWARD) & (kind[1:] == BACKWARD) & nothing, False)
        end = np.where(has_loss, np.append(begin[1:], 0), end)
    return Passes(begin=begin, end=end, kind=kind)


def infer_stage(tables: RankTables, spans: Array, operations: Array, steps: RankSteps) -> InferredStage | str:
    """Return what a rank tells of its place in a pipeline, else why nothing can be inferred."""
    passes = find_passes(tables, spans, operations)
    step = locate(passes.begin, steps.windows)
    inside = step >= 0
    step, kind = step[inside], passes.kind[inside]
    passes = Passes(begin=passes.begin[inside], end=passes.end[inside], kind=kind)
    if not (kind == FORWARD).any() or not (kind == BACKWARD).any():
        return NO_PASSES
    forwards, backwards = (
        np.bincount(step[kind == which], minlength=len(steps.windows)) for which in (FORWARD, BACKWARD)
    )
    trains = (forwards > 0) | (backwards > 0)
    if (unequal := np.flatnonzero(forwards != backwards)).size:
        at = unequal[0]
        return UNEQUAL.format(forwards=forwards[at], backwards=backwards[at])
    if len(distinct(forwards[trains])) > 1:
        return UNSTEADY
    messages = _list_messages(tables, operations, steps)
    around = locate(messages.issued, passes.times)
    if ((around >= 0) & (messages.issued > passes.begin[around])).any():
        return INSIDE
    number = _number_passes(step, kind)
    return _find_neighbours(passes, step, number, int(forwards.max()), messages)


def _number_passes(step: Column, kind: Column) -> Column:
    """Return the position of each pass among those of its kind in its step."""
    number = np.zeros(len(step), np.int64)
    for which in (FORWARD, BACKWARD):
        rows = np.flatnonzero(kind == which)
        first = np.searchsorted(step[rows], step[rows])  # steps ascend
        number[rows] = np.arange(len(rows)) - first
    return number


@dataclass(frozen=True, kw_only=True)
class _Messages:
    """Messages of one rank within its steps."""

    issued: Column
    used: Column  # receives: when the rank began to wait for it
    step: Column
    peer: Column  # rank
    is_receive: Mask


def _list_messages(tables: RankTables, operations: Array, steps: RankSteps) -> _Messages:
    rows = operations[operations["kind"] == codes.POINT_TO_POINT]
    step = locate(rows["issued_ns"], steps.windows)
    rows, step = rows[step >= 0], step[step >= 0]
    peer = np.full(len(rows), -1, np.int64)
    for number in distinct(rows["group"]).tolist():
        group = tables.groups.get(int(number))
        members = np.array(group.ranks if group is not None else (), np.int64)
        chosen = (rows["group"] == number) & (rows["peer"] >= 0) & (rows["peer"] < len(members))
        peer[chosen] = members[rows["peer"][chosen]]
    receives = [number for number, name in enumerate(tables.ops) if name == "recv"]
    return _Messages(
        issued=rows["issued_ns"],
        used=np.maximum(rows["issued_ns"], rows["wait_begin_ns"]),
        step=step,
        peer=peer,
        is_receive=is_any(rows["op"], receives) & (peer >= 0),
    )


def _find_neighbours(
    passes: Passes, step: Column, number: Column, microbatches: int, messages: _Messages
) -> InferredStage | str:
    """Return the stages before and after, from whose messages all passes but those of the ends begin."""
    received = messages.is_receive
    used, peer, in_step = messages.used[received], messages.peer[received], messages.step[received]
    following = np.searchsorted(passes.begin, used)
    taken = following < len(passes.begin)
    taken[taken] = step[following[taken]] == in_step[taken]
    used, peer, in_step, kind = used[taken], peer[taken], in_step[taken], passes.kind[following[taken]]
    sources = {which: distinct(peer[kind == which]).tolist() for which in (FORWARD, BACKWARD)}
    before, after = sources[FORWARD], sources[BACKWARD]
    if not before and not after:
        return NO_MESSAGES
    if reason := _why_ambiguous(before, after):
        return reason
    for which, some in sources.items():
        if not some:
            continue
        arrived = np.sort(used[kind == which])
        rows = passes.kind == which
        # The i-th pass of a step takes the i-th message of it at the earliest.
        first = np.searchsorted(np.sort(in_step[kind == which]), step[rows])
        if (np.searchsorted(arrived, passes.begin[rows], side="right") - first <= number[rows]).any():
            return NOT_FED
    return InferredStage(
        previous=before[0] if before else None,
        following=after[0] if after else None,
        microbatches=microbatches,
        passes=passes,
        number=number,
    )


def _why_ambiguous(before: Sequence[int], after: Sequence[int]) -> str:
    """Return why ranks that send to forward and to backward passes are not one stage before and one after; or ''."""
    if both := sorted(set(before) & set(after)):
        return SEVERAL.format(both=list_ranks(both))
    if len(before) > 1 or len(after) > 1:
        previous, following = (list_ranks(some) if some else "none" for some in (before, after))
        return AMBIGUOUS.format(previous=previous, following=following)
    return ""


def join_places(known: InferredStage, newest: InferredStage) -> InferredStage | str:
    """Return the place of a rank, given what two stretches of its log tell, else why nothing can be inferred.

    Passes are left out: they are wanted of single stretches alone.
    """
    if known.microbatches != newest.microbatches:
        return UNSTEADY
    before = sorted({rank for rank in (known.previous, newest.previous) if rank is not None})
    after = sorted({rank for rank in (known.following, newest.following) if rank is not None})
    if reason := _why_ambiguous(before, after):
        return reason
    nothing = np.zeros(0, np.int64)
    return replace(
        newest,
        previous=before[0] if before else None,
        following=after[0] if after else None,
        passes=Passes(begin=nothing, end=nothing, kind=nothing),
        number=nothing,
    )


def join_stages(inferred: Mapping[int, InferredStage]) -> tuple[list[tuple[int, ...]], dict[int, str]]:
    """Return the chains of ranks that stages form, first stage first, and why the other ranks are in none."""
    chains = [chain for rank in sorted(inferred) if (chain := _follow(rank, inferred))]
    placed = {rank for chain in chains for rank in chain}
    return chains, {rank: NOT_A_CHAIN for rank in inferred if rank not in placed}


def _follow(first: int, inferred: Mapping[int, InferredStage]) -> tuple[int, ...]:
    """Return the chain that begins with a first stage; empty where it does not end with a last one."""
    if inferred[first].previous is not None:
        return ()
    chain = [first]
    while (following := inferred[chain[-1]].following) is not None:
        stage = inferred.get(following)
        if stage is None or stage.previous != chain[-1] or stage.microbatches != inferred[first].microbatches:
            return ()
        chain.append(following)
    return tuple(chain) if len(chain) > 1 else ()


def name_schedule(orders: Sequence[Sequence[int]], microbatches: int) -> str:
    """Return the schedule in which the ranks of a pipeline run their passes.

    Parameters:
        orders: of each rank the kinds of its passes in one step, first stage first.
    """
    for name in SCHEDULES:
        planned = list(_plan_of(name, len(orders), microbatches))
        if [list(order) for order in orders] == planned:
            return name
    return BY_HAND


def _plan_of(name: str, num_ranks: int, microbatches: int) -> Iterator[list[int]]:
    """Yield the kinds of passes of each rank."""
    for rank in range(num_ranks):
        ahead = microbatches if name == "GPipe" else min(microbatches, num_ranks - 1 - rank)
        steady = [FORWARD, BACKWARD] * (microbatches - ahead)
        yield [FORWARD] * ahead + steady + [BACKWARD] * ahead


def place_stage(pipeline: Pipeline, chain: Sequence[int], rank: int, schedule: str) -> Pipeline:
    """Return the pipeline of a rank with its place in a chain."""
    at = chain.index(rank)
    return replace(
        pipeline, schedule=schedule, num_stages=len(chain), stages=(at,), group_rank=at, group_size=len(chain)
    )
