"""Compress sealed segments while the job runs, at a lower priority than the job."""

from pathlib import Path

from dtprof import fence
from dtprof.launch.launcher_thread import NICENESS, LauncherThread
from dtprof.records import paths, schema

EVERY_S = 2.0
STOP_S = 60.0
"""How long the end of a job waits for a disk that does not answer."""


class Archiver:
    """A thread of the launcher that archives sealed segments of a run."""

    def __init__(self, run: Path) -> None:
        """Start watching the run directory."""
        self._run = run
        self._given_up: set[Path] = set()
        self._thread = LauncherThread(self._work, "archiver", niceness=NICENESS)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current segment and stop."""
        self._thread.stop(STOP_S)

    @fence.fenced("the search for full segments", "has ended: they stay as they are, uncompressed")
    def _work(self) -> None:
        while not self._thread.ended.wait(EVERY_S):
            self._archive_sealed()

    @fence.fenced("the search for full segments", "failed")
    def _archive_sealed(self) -> None:
        for segment in sealed_segments(self._run):
            if self._thread.ended.is_set():
                return
            if segment not in self._given_up and not self._archive(segment):
                self._given_up.add(segment)

    @fence.fenced("a full segment", "stays as it is, uncompressed")
    def _archive(self, segment: Path) -> bool:
        from dtprof.records.rank_log import archive

        archive.archive_segment(segment)
        return True


def sealed_segments(run: Path) -> list[Path]:
    """Return the segments not archived yet that their ranks will not write to again."""
    sealed: list[Path] = []
    for folder in run.iterdir():
        if paths.parse_rank_folder(folder.name) is not None:
            # Ranks write to the newest two; their headers need not be read.
            sealed += [
                file for file in paths.segment_files(folder)[:-2] if not paths.is_archive(file) and _sealed(file)
            ]
    return sealed


def _sealed(segment: Path) -> bool:
    try:
        with segment.open("rb", buffering=0) as file:
            file.seek(schema.HEADER_OFFSET["marks"])
            return bool(int.from_bytes(file.read(4), "little") & schema.MARK["sealed"])
    except OSError:
        return False  # dropped by its rank meanwhile
