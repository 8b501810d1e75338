"""Objects of the job, remembered without keeping them alive."""

import weakref
from collections.abc import Iterator
from typing import Any

FIRST_SWEEP = 64


class LiveObjects:
    """Weakly referenced objects by id, for as long as they live: Python reuses the id of a dead object.

    The references have no callback: an exception that a signal handler of the program raises in there would be lost.
    Dead references are swept out whenever the table has doubled.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._sweep_at = FIRST_SWEEP

    def add(self, value: Any) -> None:
        """Remember an object for as long as it lives."""
        if len(self._refs) >= self._sweep_at:
            self._refs = {key: ref for key, ref in list(self._refs.items()) if ref() is not None}
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._refs))
        self._refs[id(value)] = weakref.ref(value)

    def __contains__(self, sought: object) -> bool:
        """Say whether this very object, not an equal one, is remembered."""
        ref = self._refs.get(id(sought))
        return ref is not None and ref() is sought

    def __iter__(self) -> Iterator[Any]:
        """Yield the objects that are alive."""
        for ref in list(self._refs.values()):
            if (value := ref()) is not None:
                yield value

    def __len__(self) -> int:
        """Return the number of references, dead ones not yet swept out included."""
        return len(self._refs)

    def clear(self) -> None:
        """Forget all."""
        self._refs.clear()
