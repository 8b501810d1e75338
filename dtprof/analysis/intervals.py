"""Arithmetic of time intervals on numpy arrays.

`Intervals` are int64 of shape (n, 2), begin and end in ns, half open, sorted, disjoint, none empty. `union` makes such
out of any pairs; everything else expects them and returns them.
"""

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
    cuts = _cuts(a, b)
    return _select(cuts, _covers_from(a, cuts) & ~_covers_from(b, cuts))


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in both."""
    cuts = _cuts(a, b)
    return _select(cuts, _covers_from(a, cuts) & _covers_from(b, cuts))


def total(a: Intervals) -> int:
    """Return the length of all together."""
    return int((a[:, 1] - a[:, 0]).sum())


def paint(layers: Sequence[Intervals], window: Intervals) -> tuple[Column, Column]:
    """Give every moment of the window to the first layer that covers it.

    Returns:
        The moments at which an owner begins, and the owner from there to the next: the position of the layer,
        len(layers) where none covers, -1 outside the window. Neighbours may have the same owner.
    """
    cuts = _cuts(window, *layers)
    owner = np.full(len(cuts), len(layers), np.int64)
    for position in reversed(range(len(layers))):
        owner[_covers_from(layers[position], cuts)] = position
    owner[~_covers_from(window, cuts)] = -1
    return cuts, owner


def share_out(layers: Sequence[Intervals], window: Intervals) -> Column:
    """Return how long each layer owns each interval of the window: shape (len(window), len(layers) + 1).

    The last column is what no layer covers. Rows sum to the length of the interval, exactly.
    """
    cuts, owner = paint(layers, window)
    lengths = np.diff(cuts, append=cuts[-1:])
    first = np.searchsorted(cuts, window[:, 0])
    last = np.searchsorted(cuts, window[:, 1])
    shares = np.zeros((len(window), len(layers) + 1), np.int64)
    for position in range(len(layers) + 1):
        so_far = np.concatenate(([0], np.cumsum(np.where(owner == position, lengths, 0))))
        shares[:, position] = so_far[last] - so_far[first]
    return shares


def _cuts(*several: Intervals) -> Column:
    """Return every begin and end once, in order. (np.unique hashes, which is many times slower here.)"""
    times = np.sort(np.concatenate([a.ravel() for a in several]), kind="stable")
    return times[np.r_[True, np.diff(times) != 0]] if len(times) else times


def _covers_from(a: Intervals, cuts: Column) -> Mask:
    """Say of each cut whether what follows it is covered; all begins and ends of `a` are cuts."""
    change = np.zeros(len(cuts), np.int8)
    at = np.searchsorted(cuts, a)
    change[at[:, 0]] += 1
    change[at[:, 1]] -= 1
    covered: Mask = np.cumsum(change, dtype=np.int8) > 0
    return covered


def _select(cuts: Column, chosen: Mask) -> Intervals:
    """Return the stretches between neighbouring cuts that are chosen, neighbours merged."""
    steps = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return pair(cuts[steps[:-1] == 1], cuts[steps[:-1] == -1])
