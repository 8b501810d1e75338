"""Slowdown of a run against its ideal: S, and S by operation type, rank and stage.

Definitions of Lin et al. (OSDI'25): S is the replayed step over the ideal one; S of a part the same with all ideal but
that part. M_W and M_S are the share of the slowdown that goes when the slowest 3 % of workers, or the last stage, are
made ideal.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.columns import distinct
from dtprof.intervals import Floats, Mask

Name = TypeVar("Name", int, str)
SLOWEST = 0.03
"""Of the workers, for M_W."""
MAX_RANKS = 64
"""Ranks whose slowdown is replayed; of more those whose operations take longest."""


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """Slowdowns over the ideal step; None where there is nothing to compare."""

    replayed_ns: float
    ideal_ns: float
    by_operation: Mapping[str, float]
    by_rank: Mapping[int, float]
    by_stage: Mapping[int, float]
    m_w: float | None
    m_s: float | None
    slowest_ranks: tuple[int, ...] = ()  # those of m_w

    @property
    def slowdown(self) -> float | None:
        """S: the replayed step over the ideal one."""
        return self.replayed_ns / self.ideal_ns if self.ideal_ns > 0 else None


def measure_slowdowns(graph: OperationGraph) -> Slowdowns:
    """Replay the graph as it was, as ideal, and with all ideal but one part."""
    names = list(dict.fromkeys(kind.name for kind in graph.kinds))
    number = np.array([names.index(kind.name) for kind in graph.kinds])
    of_name = np.where(graph.kind >= 0, number[graph.kind], -1)
    ranks = _choose_ranks(graph)
    stages = distinct(graph.stage[graph.stage >= 0]).tolist()
    replicas = sorted({replica for replica, _ in graph.replicas.values()})
    replica_of = {rank: replica for rank, (replica, _) in graph.replicas.items()}
    of_replica = np.array([replica_of.get(rank, -1) for rank in range(int(graph.rank.max(initial=-1)) + 2)])[graph.rank]
    parts: list[Mask] = [of_name == i for i in range(len(names))]
    parts += [graph.rank == rank for rank in ranks]
    parts += [graph.stage == stage for stage in stages]
    parts += [(of_replica == replica) & (graph.rank >= 0) for replica in replicas]
    left_slow = (np.where(part, graph.durations, graph.ideal) for part in parts)
    means = graph.replay_means(itertools.chain((graph.durations, graph.ideal), left_slow))
    replayed, ideal, *rest = means.tolist()
    shares = [one / ideal if ideal > 0 else 1.0 for one in rest]
    by_operation = dict(zip(names, shares, strict=False))
    shares = shares[len(names) :]
    by_rank = dict(zip(ranks, shares, strict=False))
    by_stage = dict(zip(stages, shares[len(ranks) :], strict=False))
    by_replica = dict(zip(replicas, shares[len(ranks) + len(stages) :], strict=True))
    scores = {
        rank: min(by_replica[replica], by_stage[stage]) for rank, (replica, stage) in graph.replicas.items()
    } or by_rank
    slowest = _slowest(scores)
    fixed = [np.isin(graph.rank, slowest) if slowest else None, graph.stage == stages[-1] if len(stages) > 1 else None]
    m_w, m_s = _recovered(graph, fixed, replayed, ideal)
    return Slowdowns(
        replayed_ns=replayed,
        ideal_ns=ideal,
        by_operation=_descending(by_operation),
        by_rank=_descending(by_rank),
        by_stage=_descending(by_stage),
        m_w=m_w,
        m_s=m_s,
        slowest_ranks=slowest,
    )


def _choose_ranks(graph: OperationGraph) -> list[int]:
    """Return the ranks to replay, ascending."""
    own = graph.rank >= 0
    late = np.bincount(graph.rank[own], (graph.durations - graph.ideal)[own])
    known = distinct(graph.rank[own])
    if len(known) > MAX_RANKS:
        known = np.sort(known[np.argsort(-late[known], kind="stable")[:MAX_RANKS]])
    ranks: list[int] = known.tolist()
    return ranks


def _slowest(scores: Mapping[int, float]) -> tuple[int, ...]:
    """Choose the slowest workers, of equal scores the lower ranks; none of a single worker."""
    if len(scores) < 2:
        return ()
    count = -(-len(scores) * round(100 * SLOWEST) // 100)
    return tuple(sorted(sorted(scores, key=lambda rank: (-scores[rank], rank))[:count]))


def _recovered(
    graph: OperationGraph, fixed: Sequence[Mask | None], replayed: float, ideal: float
) -> list[float | None]:
    """Return the share of the slowdown that goes when each of these parts is made ideal."""
    if replayed <= ideal:
        return [None for _ in fixed]
    scenarios: list[Floats] = [np.where(part, graph.ideal, graph.durations) for part in fixed if part is not None]
    means = iter(graph.replay_means(scenarios).tolist())
    return [(replayed - next(means)) / (replayed - ideal) if part is not None else None for part in fixed]


def _descending(shares: Mapping[Name, float]) -> dict[Name, float]:
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
