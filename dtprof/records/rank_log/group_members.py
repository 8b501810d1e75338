"""The members of a group: global ranks by rank in the group, of which a job has few sets but very many copies.

A group of all ranks has as many members as the job has ranks, and each rank records it. Equal sets are therefore one
object (`share`), also after they were sent to another process, and work proportional to their size is done once.
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


class Members(tuple[int, ...]):
    """Global ranks by rank in the group; compares and hashes like the tuple that it is."""

    def __hash__(self) -> int:
        """Return the cached hash; a tuple computes it anew each time."""
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle so that another process gets its shared object."""
        return (_in_range, self._range) if self._range is not None else (share, (tuple(self),))

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @functools.cached_property
    def _range(self) -> tuple[int, int, int] | None:
        """Return first, number and distance of evenly spaced members; None for others."""
        stride = self[1] - self[0] if len(self) > 1 else 1
        return (self[0], len(self), stride) if self and self == _listed(self[0], len(self), stride) else None

    @functools.cached_property
    def array(self) -> npt.NDArray[np.int64]:
        """The same as an array."""
        return np.array(self, np.int64)

    @functools.cached_property
    def lowest(self) -> int:
        """The lowest global rank; -1 of none."""
        return min(self, default=-1)

    def place_of(self, rank: int) -> int:
        """Return the rank in the group of a global rank; -1 where it is no member."""
        places = np.flatnonzero(self.array == rank)
        return int(places[0]) if len(places) else -1


@functools.lru_cache(maxsize=65_536)
def _known(ranks: Members) -> Members:
    return ranks


def share(ranks: Iterable[int]) -> Members:
    """Return the shared object of these members."""
    return _known(ranks if isinstance(ranks, Members) else Members(ranks))


def share_range(first: int, count: int, stride: int) -> Members:
    """Return the shared object of evenly spaced members."""
    return _in_range(first, count, stride)


@functools.lru_cache(maxsize=1024)
def _in_range(first: int, count: int, stride: int) -> Members:
    return share(_listed(first, count, stride))


def _listed(first: int, count: int, stride: int) -> tuple[int, ...]:
    return tuple(first + stride * i for i in range(count))
