"""The graph of a run: operations of all ranks, their dependencies, durations and ideal durations."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dtprof.analysis.whatif.replay import MAX_CELLS, Dependencies
from dtprof.intervals import Column, Floats, Mask

STRUCTURE = -1
"""The kind, and the rank, of nodes that only join others: the arrival of the last member of a collective."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The type of operations of one kind: computation of a phase, or one collective of one axis."""

    name: str  # forward, all_reduce dp
    op: str = ""  # communication: all_reduce, send; computation: empty
    group: str = ""  # communication: axis, or description of the group

    @property
    def is_communication(self) -> bool:
        """Say whether it moves data between ranks."""
        return bool(self.op)


@dataclass(frozen=True, kw_only=True)
class OperationGraph:
    """Operations as nodes; times in ns. Columns have a row for each node."""

    dependencies: Dependencies
    durations: Floats
    modelled: tuple[Floats, ...]  # the like, without the accidents of the run: by their replay the graph is judged
    ideal: Floats
    kinds: tuple[Kind, ...]
    kind: Column
    rank: Column
    stage: Column  # of the pipeline; -1: none
    step: Column  # position among the steps; -1: none
    nbytes: Column  # of communication; 0: not known
    is_wide_sum: Mask  # of communication: reductions of 32-bit numbers on a device; False where that is not known
    is_superseded: Mask  # of communication: gradients that are reduced again in the same step; nobody knows: False
    instance: Column  # of communication: the same number for all members; -1: not known
    issued_by: Column  # of communication: the node at whose end it is issued; -1: not known
    hosts: Mapping[int, str]  # by rank; empty: not known
    group_sizes: Mapping[str, int]  # by group of the kinds of communication
    world_size: int
    steps: tuple[int, int]  # first and last of those in the graph
    step_ends: Sequence[Column]  # of each step the nodes of which the last ends it
    chained: bool  # a step begins where the one before ends; else each begins at 0
    begins: Column  # chained: the nodes of which the last begins the first step
    measured_ns: Floats  # how long each step was
    chains: Sequence[Column] = ()  # the main line of each rank, its nodes in order; empty: not known
    replicas: dict[int, tuple[int, int]] = field(default_factory=dict)  # of ranks of a pipeline: replica and stage
    caveats: tuple[str, ...] = ()

    def replay_steps(self, scenarios: Iterable[Floats]) -> Floats:
        """Return how long each step is in each scenario, a column each, given the durations of one after the other."""
        width = max(1, MAX_CELLS // max(1, len(self.durations)))
        columns = iter(scenarios)
        parts = []
        while some := list(itertools.islice(columns, width)):
            parts.append(self._replay(np.stack(some, axis=1)))
        return np.concatenate([*parts, np.zeros((self.num_steps, 0))], axis=1)

    def _replay(self, scenarios: Floats) -> Floats:
        ends = self.dependencies.replay(scenarios)
        last = np.stack([ends[nodes].max(axis=0) for nodes in self.step_ends])
        if not self.chained:
            return last
        return np.diff(last, axis=0, prepend=ends[self.begins].max(axis=0)[np.newaxis])

    def replay_ends(self) -> Floats:
        """Return when each node ends as the run was."""
        ends: Floats = self.dependencies.replay(self.durations[:, np.newaxis])[:, 0]
        return ends

    def replay_means(self, scenarios: Iterable[Floats]) -> Floats:
        """Return the mean step of each scenario."""
        means: Floats = self.replay_steps(scenarios).mean(axis=0)
        return means

    def is_of(self, wanted: Callable[[Kind], bool]) -> Mask:
        """Say which nodes are of such a kind."""
        return np.array([*map(wanted, self.kinds), False])[self.kind]

    @property
    def num_steps(self) -> int:
        """Return how many steps are in the graph."""
        return len(self.step_ends)

    def depending_on(self, dependencies: Dependencies) -> "OperationGraph":
        """Return the same operations with other dependencies."""
        return replace(self, dependencies=dependencies)
