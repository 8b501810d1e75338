"""How often something may be done that is to take no more than a share of the time."""

from collections.abc import Callable


class Pace:
    """Allows something as often as it takes a share of the time, and not more often than that."""

    def __init__(self, *, every_s: float, share: float, clock: Callable[[], float]) -> None:
        """Allow the first at once."""
        self._every_s, self._share, self._clock = every_s, share, clock
        self._due = clock()

    @property
    def is_due(self) -> bool:
        """Say whether the next one may begin."""
        return self._clock() >= self._due

    def charge(self, took_s: float) -> None:
        """Say what one that has just ended took."""
        self._due = self._clock() + max(self._every_s, took_s / self._share)
