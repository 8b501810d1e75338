"""The graph of a job from the main lines of its ranks.

A collective, or a message, begins when the last of its members has issued it and is done with those before it in its
group; from there each member has its transfer. A member that was done before the last one came (a buffered send, the
root of a broadcast) waits for nobody. Steps follow one another, so that a rank may be ahead of the others.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.whatif.operation_graph import STRUCTURE, Kind, OperationGraph
from dtprof.analysis.whatif.random_draws import RandomDraws
from dtprof.analysis.whatif.rank_line import LABELS, RankLine
from dtprof.analysis.whatif.replay import Dependencies
from dtprof.columns import median, number_alike, number_distinct
from dtprof.interning import Interned
from dtprof.intervals import Column, Floats
from dtprof.job.axes import axis_words

DRAWS = 4
_SEED = 11


@dataclass
class _Nodes:
    """Nodes in blocks, and the edges between them."""

    count: int = 0
    durations: list[Floats] = field(default_factory=list)
    kind: list[Column] = field(default_factory=list)
    rank: list[Column] = field(default_factory=list)
    step: list[Column] = field(default_factory=list)
    before: list[Column] = field(default_factory=list)
    after: list[Column] = field(default_factory=list)

    def add(self, durations: Floats, kind: Column | int, rank: int, step: Column | int) -> Column:
        """Add nodes and return their numbers."""
        numbers = np.arange(self.count, self.count + len(durations))
        self.count += len(durations)
        self.durations.append(durations)
        for column, value in ((self.kind, kind), (self.rank, rank), (self.step, step)):
            column.append(np.broadcast_to(np.asarray(value, np.int64), len(durations)))
        return numbers

    def link(self, before: Column, after: Column) -> None:
        """Let nodes follow others."""
        self.before.append(before)
        self.after.append(after)


@dataclass
class _Member:
    """The operations of one rank in the graph."""

    node: Column  # of the transfer
    issue: Column  # the node at whose end it is issued
    instance: Column
    previous: Column  # the operation before it in its group, a row of these; -1: none


def build_graph(lines: Sequence[RankLine]) -> OperationGraph | str:
    """Return the graph of a job; a sentence where it cannot be replayed."""
    origin = min(int(line.bounds[0]) for line in lines)
    nodes, kinds = _Nodes(), Interned[Kind]()
    channels: Interned[object] = Interned()
    for label in LABELS:
        kinds.number(Kind(name=label))
    members: list[_Member] = []
    chains = [_add_line(nodes, line, origin) for line in lines]
    channel = [
        np.array([channels.number(channel) for channel in line.channels], np.int64)[line.channel] for line in lines
    ]
    instance, known = number_alike(np.concatenate(channel), np.concatenate([line.seq for line in lines]))
    bounds = np.cumsum([0, *map(len, channel)])
    # An operation starts with its last member: the others' transfers count from there, not from their own calls.
    arrival = np.zeros(len(known), np.int64)
    for line, chain, (low, high) in zip(lines, chains, itertools.pairwise(bounds.tolist()), strict=True):
        member = _add_members(nodes, line, chain, instance[low:high], kinds)
        members.append(member)
        np.maximum.at(arrival, member.instance, _ready(line, member))
    # One node an operation, of no duration, stands for the moment at which all members have come.
    joins = nodes.add(np.zeros(len(known)), STRUCTURE, STRUCTURE, STRUCTURE)
    for line, member, chain in zip(lines, members, chains, strict=True):
        _link_members(nodes, line, member, chain, arrival, joins)
    graph = Dependencies(num_nodes=nodes.count, before=np.concatenate(nodes.before), after=np.concatenate(nodes.after))
    if not graph.is_acyclic:
        return "its operations wait for each other in a circle: clocks or records are damaged"
    ends = np.stack([line.bounds for line in lines]).max(axis=0)
    durations = np.concatenate(nodes.durations)
    kind, rank, step = (np.concatenate(column) for column in (nodes.kind, nodes.rank, nodes.step))
    stage = np.full(max(line.rank for line in lines) + 2, -1)
    for line in lines:
        stage[line.rank] = line.stage
    ends_of = [
        chain[np.searchsorted(line.cuts, line.bounds[1:], "left")] for line, chain in zip(lines, chains, strict=True)
    ]
    nbytes, (is_wide_sum, is_superseded) = np.zeros(nodes.count, np.int64), np.zeros((2, nodes.count), np.bool_)
    # Of an operation that one of its members needs, all take part.
    needed = np.zeros(len(known), np.bool_)
    for line, member in zip(lines, members, strict=True):
        needed[member.instance[~line.is_superseded]] = True
    instance_of, issued_by = np.full((2, nodes.count), STRUCTURE)
    for line, member in zip(lines, members, strict=True):
        nbytes[member.node], is_wide_sum[member.node] = line.nbytes, line.is_wide_sum
        is_superseded[member.node] = ~needed[member.instance]
        instance_of[member.node], issued_by[member.node] = member.instance, member.issue
    # Kinds without a node are dropped. STRUCTURE, the smallest number, is added so that it comes first, and is -1
    # again.
    used, kind = np.unique(np.append(kind, STRUCTURE), return_inverse=True)
    kind = kind.reshape(-1)[:-1] - 1
    found = tuple(kinds.values[number] for number in used.tolist() if number >= 0)
    return OperationGraph(
        dependencies=graph,
        durations=durations,
        modelled=_redraw(durations, lines, members, chains, arrival),
        ideal=idealise(durations, kind, rank, step, nbytes, found),
        kinds=found,
        kind=kind,
        rank=rank,
        stage=np.where(rank >= 0, stage[rank], -1),
        step=step,
        nbytes=nbytes,
        is_wide_sum=is_wide_sum,
        is_superseded=is_superseded,
        instance=instance_of,
        issued_by=issued_by,
        hosts={line.rank: line.host for line in lines if line.host},
        group_sizes=_group_sizes(lines),
        world_size=len(lines),
        steps=(int(lines[0].steps[0]), int(lines[0].steps[-1])),
        step_ends=list(np.stack(ends_of, axis=1)),
        chained=True,
        chains=chains,
        begins=np.array([chain[0] for chain in chains]),
        measured_ns=np.diff(ends).astype(np.float64),
    )


def _redraw(
    durations: Floats, lines: Sequence[RankLine], members: Sequence[_Member], chains: Sequence[Column], arrival: Column
) -> tuple[Floats, ...]:
    """Return durations like those of the run, but for its accidents: several draws.

    A transfer is the mean of the members of its operation, times the share of that mean that the rank took in another
    operation of the kind, taken at random. Operations in which the rank arrived last are apart: it is awake, and sooner
    done. Means alone would be too short, as the slowest member holds up what follows. All waits of a rank take one
    time to wake up.
    """
    together = [line.done >= arrival[member.instance] for line, member in zip(lines, members, strict=True)]
    rows = np.concatenate([member.node[some] for member, some in zip(members, together, strict=True)])
    instance = np.concatenate([member.instance[some] for member, some in zip(members, together, strict=True)])
    sums, counts = np.bincount(instance, durations[rows]), np.bincount(instance)
    means = (sums / np.maximum(counts, 1))[instance] if len(rows) else np.zeros(0)
    strata, number = [], 0
    for line, member, some in zip(lines, members, together, strict=True):
        is_last = (_ready(line, member) >= arrival[member.instance]).astype(np.int64)
        place, kinds = number_alike(line.op[some], line.group[some], is_last[some])
        strata.append(number + place)
        number += len(kinds)
    shares = np.where(means > 0, durations[rows] / np.where(means > 0, means, 1.0), 1.0)
    stratum = np.concatenate(strata)
    in_turn = np.argsort(stratum, kind="stable")
    woken = [chain[line.waits_for >= 0] for line, chain in zip(lines, chains, strict=True)]
    random = RandomDraws(_SEED)
    drawn = []
    for _ in range(DRAWS):
        modelled = durations.copy()
        at_random = np.lexsort((random.draw((len(rows),)), stratum))
        modelled[rows[in_turn]] = means[in_turn] * shares[at_random]
        for waits in woken:
            if len(waits):
                modelled[waits] = durations[waits].mean()
        drawn.append(modelled)
    return tuple(drawn)


def _ready(line: RankLine, member: _Member) -> Column:
    """Return when a rank has issued each operation and is done with the one before it in its group."""
    ready = line.issued.copy()
    follows = member.previous >= 0
    ready[follows] = np.maximum(ready[follows], line.done[member.previous[follows]])
    return ready


def _group_sizes(lines: Sequence[RankLine]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for line in lines:
        for group, size in zip(line.groups, line.group_sizes, strict=True):
            sizes[group] = max(size, sizes.get(group, 0))
    return sizes


def _add_line(nodes: _Nodes, line: RankLine, origin: int) -> Column:
    """Add the main line of one rank; durations of waits are filled in later, when their operations are there."""
    lengths = np.diff(line.cuts, prepend=line.cuts[0]).astype(np.float64)
    lengths[0] = line.cuts[0] - origin
    kind = np.where(line.waits_for >= 0, STRUCTURE, line.label)
    kind[0] = STRUCTURE
    step = np.searchsorted(line.bounds[1:], line.cuts, "left")
    chain = nodes.add(lengths, kind, line.rank, np.minimum(step, len(line.bounds) - 2))
    nodes.link(chain[:-1], chain[1:])
    return chain


def _add_members(nodes: _Nodes, line: RankLine, chain: Column, instance: Column, kinds: Interned[Kind]) -> _Member:
    """Add the transfers of one rank, and where each was issued."""
    which, first = number_alike(line.op, line.group)
    named = [(line.ops[line.op[row]], line.groups[line.group[row]]) for row in first.tolist()]
    kind = np.array(
        [kinds.number(Kind(name=f"{op} {axis_words(group)}".strip(), op=op, group=group)) for op, group in named],
        np.int64,
    )[which]
    step = np.minimum(np.searchsorted(line.bounds[1:], line.issued, "left"), len(line.bounds) - 2)
    own = nodes.add(np.zeros(len(line.seq)), kind, line.rank, step)
    at = np.searchsorted(line.cuts, line.issued, "right") - 1
    issue = chain[at]
    late = line.issued - line.cuts[at]
    aside = np.flatnonzero(late > 0)  # issued by another thread while the line waits
    if len(aside):
        extra = nodes.add(late[aside].astype(np.float64), STRUCTURE, line.rank, step[aside])
        nodes.link(issue[aside], extra)
        issue = issue.copy()
        issue[aside] = extra
    previous = np.full(len(line.seq), -1, np.int64)
    collective = np.array([not channel.is_p2p for channel in line.channels], np.bool_)[line.channel]
    order = np.lexsort((line.issued, line.channel))
    order = order[collective[order]]
    same = line.channel[order][1:] == line.channel[order][:-1]
    in_turn = line.done[order][1:] >= line.done[order][:-1]
    chosen = np.flatnonzero(same & in_turn)
    previous[order[chosen + 1]] = order[chosen]
    return _Member(node=own, issue=issue, instance=instance, previous=previous)


def _link_members(
    nodes: _Nodes, line: RankLine, member: _Member, chain: Column, arrival: Column, joins: Column
) -> None:
    """Link transfers to the arrival of the last member and to their issuing nodes, and waits to transfers."""
    follows = member.previous >= 0
    if not len(line.seq):
        return
    before = np.where(follows, member.node[member.previous], 0)
    nodes.link(member.issue, joins[member.instance])
    nodes.link(before[follows], joins[member.instance[follows]])
    began = arrival[member.instance]
    early = line.done < began
    nodes.link(joins[member.instance[~early]], member.node[~early])
    nodes.link(member.issue[early], member.node[early])
    both = early & follows
    nodes.link(before[both], member.node[both])
    alone = np.where(follows, np.maximum(line.issued, line.done[member.previous]), line.issued)
    began = np.where(early, alone, began)
    # A host sees a message completed when it waits for it: what came earlier took no longer than that wait.
    took = np.maximum(line.done - np.maximum(began, line.seen_from), 0)
    nodes.durations[_block_of(nodes, member.node)] = took.astype(np.float64)
    _set_wakes(nodes, line, chain, began + took)
    waits = np.flatnonzero(line.waits_for >= 0)
    nodes.link(member.node[line.waits_for[waits]], chain[waits])


def _set_wakes(nodes: _Nodes, line: RankLine, chain: Column, done: Column) -> None:
    """Set the duration of each wait beyond the completion of its operation."""
    waits = np.flatnonzero(line.waits_for >= 0)
    begun = line.cuts[np.maximum(waits - 1, 0)]
    lengths = nodes.durations[_block_of(nodes, chain)]
    lengths[waits] = line.cuts[waits] - np.maximum(done[line.waits_for[waits]], begun)


def _block_of(nodes: _Nodes, numbers: Column) -> int:
    """Return the position of the block of these nodes."""
    ends = np.cumsum([len(block) for block in nodes.durations])
    return int(np.searchsorted(ends, numbers[0], "right"))


def idealise(
    durations: Floats, kind: Column, rank: Column, step: Column, nbytes: Column, kinds: Sequence[Kind]
) -> Floats:
    """Return ideal durations: the mean over ranks and steps for computation, the median of a size for transfers.

    The pieces of a phase are compared in order where all ranks have as many of them in each step; else the phase of
    each rank and step is scaled, as a whole, to the mean.
    """
    ideal = durations.copy()
    for number, own in enumerate(kinds):
        rows = np.flatnonzero(kind == number)
        if not len(rows):
            continue
        if own.is_communication:
            sizes, size = number_distinct(nbytes[rows])
            for each in range(len(sizes)):
                some = rows[size == each]
                ideal[some] = median(durations[some])
            continue
        place, _ = number_alike(rank[rows], step[rows])
        counts = np.bincount(place)
        if (counts == counts[0]).all():
            order = np.argsort(place, kind="stable")
            table = durations[rows[order]].reshape(-1, counts[0])
            ideal[rows[order]] = np.broadcast_to(table.mean(axis=0), table.shape).ravel()
        else:
            totals = np.bincount(place, durations[rows])
            scale = np.where(totals > 0, totals.mean() / np.where(totals > 0, totals, 1), 1.0)
            ideal[rows] *= scale[place]
    return ideal
