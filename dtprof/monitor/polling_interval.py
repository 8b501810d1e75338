"""The polling interval of work that may take no more than a share of the time."""

from collections.abc import Callable


class PollingInterval:
    """Allows work at an interval, longer where it would take more than its share of the time."""

    def __init__(self, *, every_s: float, share: float, clock: Callable[[], float]) -> None:
        """Allow work at once."""
        self._every_s, self._share, self._clock = every_s, share, clock
        self._due = clock()

    @property
    def is_due(self) -> bool:
        """Say whether the work may begin."""
        return self._clock() >= self._due

    def charge(self, took_s: float, *, since: float | None = None) -> None:
        """Report the duration of the last work; the interval runs from now, or from the begin of the work."""
        self._due = (self._clock() if since is None else since) + max(self._every_s, took_s / self._share)
