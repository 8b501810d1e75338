"""Objects of the job that are known without being kept alive."""

import weakref
from collections.abc import Iterator
from typing import Any

FIRST_SWEEP = 64


class Known:
    """Objects by id, for as long as they live: an id may be another's afterwards.

    The references call nothing when an object ends: what a signal handler of the program raises in there would be lost.
    Those of dead objects are swept out when their number has doubled.
    """

    def __init__(self) -> None:
        """Know none."""
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._sweep_at = FIRST_SWEEP

    def add(self, known: Any) -> None:
        """Know an object from now on."""
        if len(self._refs) >= self._sweep_at:
            self._refs = {key: ref for key, ref in list(self._refs.items()) if ref() is not None}
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._refs))
        self._refs[id(known)] = weakref.ref(known)

    def __contains__(self, sought: object) -> bool:
        """Say whether this very object is known."""
        ref = self._refs.get(id(sought))
        return ref is not None and ref() is sought

    def __iter__(self) -> Iterator[Any]:
        """Give those that live."""
        for ref in list(self._refs.values()):
            if (known := ref()) is not None:
                yield known

    def __len__(self) -> int:
        """Return how many are held, the dead ones that are not swept out yet among them."""
        return len(self._refs)

    def clear(self) -> None:
        """Know none."""
        self._refs.clear()
