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
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NONE: Intervals = np.zeros((0, 2), np.int64)
_ALWAYS: Mask = np.ones(1, np.bool_)


def pair(begin: Column, end: Column) -> Intervals:
    """Return pairs without checks: unsorted, overlapping, empty or reversed ones stay so."""
    pairs = np.empty((len(begin), 2), np.int64)
    pairs[:, 0], pairs[:, 1] = begin, end
    return pairs


def union(pairs: Intervals) -> Intervals:
    """Return the times covered by any of the pairs; empty and reversed pairs cover nothing, touching ones merge."""
    begin, end = np.ascontiguousarray(pairs.T)
    if (end > begin).all() and (begin[1:] > end[:-1]).all():
        return pairs if len(pairs) else NONE
    return cover(begin, end)


def cover(begin: Column, end: Column) -> Intervals:
    """Return the times covered by any of the stretches with these begins and ends, as `union` does."""
    if not (covers := end > begin).all():
        begin, end = begin[covers], end[covers]
    if (begin[1:] < begin[:-1]).any():
        order = begin.argsort(kind="stable")
        begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end)
    apart = begin[1:] > reach[:-1]
    if apart.all():
        return pair(begin, end)
    first = np.concatenate((_ALWAYS, apart))
    return pair(begin[first], reach[np.concatenate((apart, _ALWAYS))])


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in `a` and not in `b`."""
    cuts, covered = _sweep((a, b))
    return _select(cuts, covered == 0b01)


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in both."""
    cuts, covered = _sweep((a, b))
    return _select(cuts, covered == 0b11)


def locate(times: Column, windows: Intervals) -> Column:
    """Return the position of the interval around each moment; -1 for none."""
    if not len(windows):
        return np.full(len(times), -1, np.int64)
    if len(times) > len(windows) and not (times[1:] < times[:-1]).any():
        bounds = np.searchsorted(times, windows.ravel())
        lengths = np.diff(bounds, prepend=0, append=len(times))
        if (lengths >= 0).all():
            places = np.full(len(lengths), -1, np.int64)
            places[1::2] = np.arange(len(windows))
            return np.repeat(places, lengths)
    at = np.searchsorted(windows[:, 0], times, "right") - 1
    return np.where((at >= 0) & (times < windows[at, 1]), at, -1)


def near(a: Intervals, windows: Intervals) -> Intervals:
    """Return the intervals of `a` that overlap a window, unclipped."""
    first = np.searchsorted(a[:, 1], windows[:, 0], "right")
    end = np.searchsorted(a[:, 0], windows[:, 1], "left")
    first[1:] = np.maximum(first[1:], end[:-1])  # an interval that overlaps two windows counts once
    lengths = np.maximum(end - first, 0)
    before = np.cumsum(lengths) - lengths
    overlapping: Intervals = a[np.repeat(first - before, lengths) + np.arange(lengths.sum())]
    return overlapping


def total(a: Intervals) -> int:
    """Return the total length."""
    return int((a[:, 1] - a[:, 0]).sum())


def measure_before(a: Intervals, times: Column) -> Column:
    """Return the length of `a` before each of these times."""
    if not len(a):
        return np.zeros(len(times), np.int64)
    lengths = np.zeros(len(a) + 1, np.int64)
    lengths[1:] = (a[:, 1] - a[:, 0]).cumsum()
    at = np.searchsorted(a[:, 0], times, "right")
    beyond = np.maximum(a[np.maximum(at - 1, 0), 1] - times, 0)
    measured: Column = lengths[at] - np.where(at > 0, beyond, 0)
    return measured


def paint(layers: Sequence[Intervals], window: Intervals) -> tuple[Column, Column]:
    """Assign every moment of the window to the first layer that covers it.

    Returns:
        The moments at which an owner begins, and the owner from there to the next: the position of the layer,
        len(layers) where none covers, -1 outside the window. Neighbours may have the same owner.
    """
    cuts, covered = _sweep((*layers, window))
    inside = covered >> len(layers) != 0
    return cuts, np.where(inside, _first_of(len(layers))[covered & ((1 << len(layers)) - 1)], -1)


def share_out(layers: Sequence[Intervals], window: Intervals) -> Column:
    """Return how long each interval of the window belongs to each layer: shape (len(window), len(layers) + 1).

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


def accumulate_maximum(values: Column, begins: Mask) -> Column:
    """Return the running maximum, restarted at each `begins`."""
    order = values.argsort(kind="stable")
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    before = (np.cumsum(begins) - 1) * len(values)
    largest: Column = values[order[np.maximum.accumulate(place + before) - before]]
    return largest


def _sweep(layers: Sequence[Intervals]) -> tuple[Column, Column]:
    """Return every begin and end once, in order, and the layers that cover the time after it: bit i for layer i."""
    present = [(1 << i, layer) for i, layer in enumerate(layers) if len(layer)]
    if not present:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    times = np.concatenate([layer.ravel() for _, layer in present])
    changes = np.empty(len(times), np.int32)
    at = 0
    for bit, layer in present:
        changes[at : at + 2 * len(layer) : 2] = bit
        changes[at + 1 : at + 2 * len(layer) : 2] = -bit
        at += 2 * len(layer)
    order = times.argsort(kind="stable")
    times, covered = times[order], changes[order].cumsum(dtype=np.int32)
    last = np.concatenate((times[1:] != times[:-1], _ALWAYS))
    return times[last], covered[last]


@functools.cache
def _first_of(num_layers: int) -> Column:
    """Return for every set of layers, as bits, the lowest layer in it; num_layers for the empty set."""
    sets = np.arange(1 << num_layers)
    first = np.full(len(sets), num_layers, np.int64)
    for layer in reversed(range(num_layers)):
        first[sets >> layer & 1 == 1] = layer
    return first


def _select(cuts: Column, chosen: Mask) -> Intervals:
    """Return the chosen stretches between cuts, adjacent ones merged."""
    steps = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return pair(cuts[steps[:-1] == 1], cuts[steps[:-1] == -1])
