"""Earliest-start replay of a graph of operations: each node begins when all it depends on have ended.

Nodes are replayed level by level: a level holds the nodes that depend on earlier levels only. One pass serves many
scenarios, a column each.
"""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtprof.intervals import Column

Floats = npt.NDArray[np.float64]
MAX_CELLS = 1 << 23
"""Nodes times scenarios that are replayed in one pass: 64 MB."""


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
        level = np.flatnonzero(left == 0)
        levels = []
        while len(level):
            levels.append(level)
            reached = targets[_ranges(bounds[level], bounds[level + 1])]
            np.subtract.at(left, reached, 1)
            level = np.unique(reached)
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
        passes = []
        for level in self.levels[1:]:
            counts = bounds[level + 1] - bounds[level]
            passes.append((level, sources[_ranges(bounds[level], bounds[level + 1])], np.r_[0, np.cumsum(counts)[:-1]]))
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


def _ranges(begins: Column, ends: Column) -> Column:
    """Return all numbers from each begin up to its end, one range after the other."""
    lengths = ends - begins
    shift = np.repeat(begins - np.r_[0, np.cumsum(lengths)[:-1]], lengths) if len(lengths) else lengths
    return shift + np.arange(int(lengths.sum()))
