"""Steps of a program that neither optimizes, loads data nor says where they end: the period of its operations."""

import numpy as np

from dtprof.columns import distinct, number_alike
from dtprof.intervals import Column
from dtprof.records.tables import UNKNOWN_NS, Array

FEWEST_PERIODS = 5
LONGEST_SEARCH = 20_000
"""Operations at the end of the run in which the period is looked for."""
AGREEMENT = 0.95
"""Share of the operations looked at that are like the one a period before."""
MOST_TOGETHER = 1 / 3
"""Share of the operations issued right after one that is still in flight, up to which each may be a step."""
_KEY = ("op", "kind", "group", "numel", "site", "peer")


def find_period_ends(operations: Array) -> tuple[Column, Column]:
    """Return where the periods end, at their longest pause, and the thread of the operations.

    Both are empty where nothing repeats at least FEWEST_PERIODS times up to the end of the run, or up to what comes
    once behind the loop: a barrier, a last evaluation.
    """
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not len(operations):
        return nothing
    threads, counts = np.unique(operations["thread"], return_counts=True)
    thread_ops = operations[operations["thread"] == threads[np.argmax(counts)]]
    likes, _ = number_alike(*(thread_ops[name] for name in _KEY))
    end = _end_of_loop(likes)
    thread_ops, likes = thread_ops[:end], likes[:end]
    period = _find_period(likes[-LONGEST_SEARCH:])
    if not period:
        return nothing
    unlike = np.flatnonzero(likes[period:] != likes[:-period])
    begin = int(unlike[-1]) + 1 if len(unlike) and len(likes) - unlike[-1] > FEWEST_PERIODS * period else 0
    thread_ops = thread_ops[begin:]
    if period == 1 and _is_issued_together(thread_ops):
        return nothing
    waited = np.where(thread_ops["wait_begin_ns"] == UNKNOWN_NS, 0, thread_ops["wait_begin_ns"] + thread_ops["wait_ns"])
    left = np.maximum(np.maximum(thread_ops["issued_ns"], thread_ops["returned_ns"]), waited)
    pauses = thread_ops["issued_ns"][1:] - left[:-1]
    pauses = pauses[: len(pauses) // period * period].reshape(-1, period)
    last = slice(int(np.argmax(np.median(pauses, axis=0))), None, period)
    return distinct(left[last]), thread_ops["thread"][last].astype(np.int64)


def _is_issued_together(alike: Array) -> bool:
    """Say whether operations, all alike, come several at a time, as fused tensors do: then one of them is no step."""
    pauses = np.diff(alike["issued_ns"])
    soon = (alike["done_ns"][:-1] > alike["issued_ns"][1:]) & (pauses < pauses.mean() / 10)
    return bool(soon.mean() > MOST_TOGETHER)


def _end_of_loop(likes: Column) -> int:
    """Return the index after the last operation of a frequent kind; the end where a long tail follows."""
    often = np.flatnonzero(np.bincount(likes)[likes] >= FEWEST_PERIODS)
    size = len(likes)
    return int(often[-1]) + 1 if len(often) and size - often[-1] <= size // 3 else size


def _find_period(likes: Column) -> int:
    """Return the shortest distance at which operations repeat; 0 where they do not."""
    size = len(likes)
    same = np.flatnonzero(likes == likes[-1])[::-1]
    for place in same[1:].tolist():
        period = size - 1 - place
        if period * FEWEST_PERIODS > size:
            return 0
        considered = likes[size // 3 :]
        if np.mean(considered[period:] == considered[:-period]) >= AGREEMENT:
            return int(period)
    return 0
