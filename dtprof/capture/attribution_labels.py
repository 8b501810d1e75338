"""Attribution labels: which framework component issued an operation, and for what."""

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry
from dtprof.records import schema
from dtprof.records.sites import Label

Describe = Callable[..., Label]


class AttributionLabels:
    """The labels of one log, each declared once in the run."""

    def __init__(self, recorder: Recorder) -> None:
        """Start without labels."""
        self.recorder = recorder
        self._lock = threading.Lock()
        self._ids: dict[Label, int] = {}
        self.known: dict[tuple[Any, ...], int] = {}
        """Ids by (describe, *parts), so that the hot path need not build the text again."""
        self._written: set[tuple[Any, ...]] = set()

    def id(self, label: Label) -> int:
        """Return the id of a label, for `Recorder.set_label`; 0 (none) once the table of the run is full."""
        known = self._ids.get(label)
        if known is not None:
            return known
        with self._lock:
            if len(self._ids) >= schema.MAX_TABLE_ENTRIES:
                return 0
            new = len(self._ids) + 1
            if self._ids.setdefault(label, new) == new:
                given = {name: value for name, value in asdict(label).items() if value not in ("", -1)}
                self.recorder.write_entry(entry("label", id=new, **given))
            return self._ids[label]

    def declare(self, describe: Describe, *parts: Any) -> int:
        """Return the id of the label `describe(*parts)`, and remember it in `known`."""
        new = self.id(describe(*parts))
        if len(self.known) < schema.MAX_TABLE_ENTRIES:
            self.known[(describe, *parts)] = new
        return new

    def first_time(self, key: tuple[Any, ...]) -> bool:
        """Say whether an entry is new to the log; False also once the log holds as many as it may."""
        if key in self._written or len(self._written) >= schema.MAX_TABLE_ENTRIES:
            return False
        self._written.add(key)
        return True
