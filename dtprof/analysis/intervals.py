"""Arithmetic of time intervals on numpy arrays.

`Intervals` are int64 of shape (n, 2), begin and end in ns, half open, sorted, disjoint, none empty. `union` makes such
out of any pairs; everything else expects them and returns them.
"""

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]
Column = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NONE: Intervals = np.zeros((0, 2), np.int64)


def pair(begin: Column, end: Column) -> Intervals:
    """Return pairs as they are given: not sorted, perhaps overlapping, empty or reversed."""
    return np.stack((begin, end), axis=1).astype(np.int64, copy=False)


def union(pairs: Intervals) -> Intervals:
    """Return the times covered by any of the pairs; empty and reversed pairs cover nothing, touching ones merge."""
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return NONE
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(pairs[:, 1])
    first = np.flatnonzero(np.r_[True, pairs[1:, 0] > reach[:-1]])
    last = np.r_[first[1:], len(pairs)] - 1
    return pair(pairs[first, 0], reach[last])


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in `a` and not in `b`."""
    cuts, covered = _sweep((a, b))
    return _select(cuts, covered == 0b01)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in both."""
    cuts, covered = _sweep((a, b))
    return _select(cuts, covered == 0b11)


def total(a: Intervals) -> int:
    """Return the length of all together."""
    return int((a[:, 1] - a[:, 0]).sum())


def paint(layers: Sequence[Intervals], window: Intervals) -> tuple[Column, Column]:
    """Give every moment of the window to the first layer that covers it.

    Returns:
        The moments at which an owner begins, and the owner from there to the next: the position of the layer,
        len(layers) where none covers, -1 outside the window. Neighbours may have the same owner.
    """
    cuts, covered = _sweep((*layers, window))
    inside = covered >> len(layers) != 0
    return cuts, np.where(inside, _first_of(len(layers))[covered & ((1 << len(layers)) - 1)], -1)


def share_out(layers: Sequence[Intervals], window: Intervals) -> Column:
    """Return how long each layer owns each interval of the window: shape (len(window), len(layers) + 1).

    The last column is what no layer covers. Rows sum to the length of the interval, exactly.
    """
    num_owners = len(layers) + 1
    cuts, owner = paint(layers, window)
    begins = np.zeros(len(cuts), np.int64)
    begins[np.searchsorted(cuts, window[:, 0])] = 1
    inside = np.flatnonzero(owner[:-1] >= 0)
    cell = (np.cumsum(begins)[inside] - 1) * num_owners + owner[inside]
    # Sums of whole numbers below 2**53 are exact in float64.
    sums = np.bincount(cell, np.diff(cuts)[inside], len(window) * num_owners)
    return sums.astype(np.int64).reshape(len(window), num_owners)


def _sweep(layers: Sequence[Intervals]) -> tuple[Column, Column]:
    """Return every begin and end once, in order, and what covers the time from there on: bit i for layer i."""
    times = np.concatenate([layer.ravel() for layer in layers])
    changes = np.concatenate([np.tile([1 << i, -(1 << i)], len(layer)) for i, layer in enumerate(layers)])
    order = np.argsort(times, kind="stable")
    times, covered = times[order], np.cumsum(changes[order])
    last = np.append(times[1:] != times[:-1], np.True_)[: len(times)]
    return times[last], covered[last]


@functools.cache
def _first_of(num_layers: int) -> Column:
    """Return for every set of layers, as bits, the lowest of them; num_layers for none."""
    sets = np.arange(1 << num_layers)
    first = np.full(len(sets), num_layers, np.int64)
    for layer in reversed(range(num_layers)):
        first[sets >> layer & 1 == 1] = layer
    return first


def _select(cuts: Column, chosen: Mask) -> Intervals:
    """Return the stretches between neighbouring cuts that are chosen, neighbours merged."""
    steps = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return pair(cuts[steps[:-1] == 1], cuts[steps[:-1] == -1])
