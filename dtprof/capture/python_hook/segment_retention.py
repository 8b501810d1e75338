"""Retention of segments under a size limit: the first and the newest stay, of the dropped ones sums remain."""

from pathlib import Path

from dtprof.capture.python_hook.segment_writer import Segment
from dtprof.records import paths, schema, writer

Key = tuple[int, int, int, int, int]
Sums = tuple[int, int, int, int, int]


class SegmentRetention:
    """The full segments of one rank."""

    def __init__(self, folder: Path, max_segments: int) -> None:
        """Start without full segments; keep them, archived or not, within the size of `max_segments`."""
        self._folder = folder
        self._bytes = max_segments * schema.SEGMENT_SIZE
        self._full: list[Segment] = []
        self._archived: dict[int, int] = {}  # number -> bytes
        self._totals: dict[Key, Sums] | None = {}
        self.dropped = 0
        """Number of dropped events."""

    def retire(self, full: Segment) -> None:
        """Take a full segment, and drop old ones until there is room for the next.

        The newest full segment is not sealed yet: the job may still wait for its operations.

        Raises:
            OSError: a file cannot be read or removed.
        """
        for segment in self._full:
            segment.mark(schema.MARK["sealed"])
        self._release_archived()
        if full not in self._full:  # else an exception from a signal handler interrupted the first try
            self._full.append(full)
        in_use = len(self._full) * schema.SEGMENT_SIZE + sum(self._archived.values())
        while in_use + schema.SEGMENT_SIZE > self._bytes:
            freed = self._drop_oldest()
            if not freed:
                return
            in_use -= freed

    def _release_archived(self) -> None:
        """Unmap the segments that the launcher has compressed: the mapping holds their disk blocks."""
        for segment in list(self._full):
            archive = paths.archive_of(segment.path)
            if not segment.path.exists() and archive.exists():
                self._archived[segment.number] = archive.stat().st_size
                self._full.remove(segment)

    def _drop_oldest(self) -> int:
        """Drop the oldest segment beyond the first quarter of the limit; return the bytes freed, 0 for none."""
        sizes = dict.fromkeys((segment.number for segment in self._full), schema.SEGMENT_SIZE) | self._archived
        room, expected = self._bytes // 4, 0
        for number in sorted(sizes):
            if number == expected and sizes[number] <= room:
                room -= sizes[number]
                expected += 1
                continue
            self._drop(number)
            return sizes[number]
        return 0

    def _drop(self, number: int) -> None:
        path = self._folder / paths.segment_name(number)
        data = _read(path)
        path.unlink(missing_ok=True)
        paths.archive_of(path).unlink(missing_ok=True)
        self._full = [segment for segment in self._full if segment.number != number]
        self._archived.pop(number, None)
        self.dropped += schema.SEGMENT_CAPACITY
        self._add_up(data)

    def _add_up(self, data: bytes) -> None:
        """Add dropped events to the sums in the run; without numpy in the job only their number is known."""
        if self._totals is None:
            return
        try:
            from dtprof.records.rank_log import dropped_totals
        except ImportError:
            self._totals = None
            return
        dropped_totals.add(self._totals, data)
        rows = [[*key, *sums] for key, sums in sorted(self._totals.items())]
        writer.write_json(self._folder / paths.DROPPED, {"events": self.dropped, "totals": rows})


def _read(path: Path) -> bytes:
    """Return the bytes of a segment, unpacked if archived."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        from dtprof.records.rank_log import archive

        return archive.unpack(paths.archive_of(path).read_bytes())
