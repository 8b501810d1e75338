"""Earliest-start replay of a graph of operations: each node begins when all it depends on have ended.

Nodes are replayed level by level: a level holds the nodes that depend on earlier levels only. One pass serves many
scenarios, a column each.
"""

import functools
from dataclasses import dataclass

import numpy as np

from dtprof.columns import distinct
from dtprof.intervals import Column, Floats

MAX_CELLS = 1 << 23
"""Nodes times scenarios that are replayed in one pass: 64 MB."""
MAX_EDGES_ONE_BY_ONE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Edges between nodes: node `after[i]` begins no earlier than `before[i]` ends."""

    num_nodes: int
    before: Column
    after: Column

    @functools.cached_property
    def _sources(self) -> tuple[Column, Column]:
        """The sources of each node: bounds by node, and nodes."""
        order = np.argsort(self.after, kind="stable")
        bounds = np.searchsorted(self.after[order], np.arange(self.num_nodes + 1))
        return bounds, self.before[order]

    @functools.cached_property
    def levels(self) -> list[Column]:
        """The nodes of each level. Nodes on a cycle, and all that depend on them, are in none."""
        order = np.argsort(self.before, kind="stable")
        targets = self.after[order]
        bounds = np.searchsorted(self.before[order], np.arange(self.num_nodes + 1))
        left = np.bincount(self.after, minlength=self.num_nodes)
        if len(targets) <= MAX_EDGES_ONE_BY_ONE:
            return _levels_one_by_one(bounds.tolist(), targets.tolist(), left.tolist())
        level = np.flatnonzero(left == 0)
        levels = []
        while len(level):
            levels.append(level)
            reached = targets[_ranges(bounds[level], bounds[level + 1])]
            np.subtract.at(left, reached, 1)
            level = distinct(reached)
            level = level[left[level] == 0]
        return levels

    @property
    def is_acyclic(self) -> bool:
        """Say whether every node can be replayed."""
        return sum(map(len, self.levels)) == self.num_nodes

    @functools.cached_property
    def _passes(self) -> list[tuple[Column, Column, Column]]:
        """Of each level but the first: its nodes, their sources, and where the sources of each begin."""
        bounds, sources = self._sources
        levels = self.levels[1:]
        if not levels:
            return []
        nodes = np.concatenate(levels)
        counts = bounds[nodes + 1] - bounds[nodes]
        grouped = sources[_ranges(bounds[nodes], bounds[nodes + 1])]
        starts = np.cumsum(counts) - counts
        ends = np.cumsum([len(level) for level in levels]).tolist()
        passes, low = [], 0
        for level, high in zip(levels, ends, strict=True):
            begin, end = int(starts[low]), int(starts[high - 1] + counts[high - 1])
            passes.append((level, grouped[begin:end], starts[low:high] - begin))
            low = high
        return passes

    def replay(self, durations: Floats) -> Floats:
        """Return when each node ends, given how long it lasts: one row a node, one column a scenario."""
        ends = durations.copy()
        for level, sources, starts in self._passes:
            if len(sources) == len(level):
                ends[level] += ends[sources]
            else:
                ends[level] += np.maximum.reduceat(ends[sources], starts, axis=0)
        return ends


def _levels_one_by_one(bounds: list[int], targets: list[int], left: list[int]) -> list[Column]:
    """Return the nodes of each level, given the targets of each node, and how many nodes each depends on.

    Array operations cost more than they save where a level has a few nodes.
    """
    level = [node for node, count in enumerate(left) if not count]
    levels = []
    while level:
        levels.append(np.array(level, np.int64))
        following = []
        for node in level:
            for target in targets[bounds[node] : bounds[node + 1]]:
                left[target] -= 1
                if not left[target]:
                    following.append(target)
        following.sort()
        level = following
    return levels


def _ranges(begins: Column, ends: Column) -> Column:
    """Return all numbers from each begin up to its end, one range after the other."""
    lengths = ends - begins
    shift = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    return shift + np.arange(int(lengths.sum()))
