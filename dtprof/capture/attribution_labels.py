"""Attribution labels: which framework component issued an operation, and for what."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry
from dtprof.records import schema


class Description(NamedTuple):
    """The content of a label."""

    api: str  # the framework in a word: ddp, fsdp, tp, pp
    text: str  # the purpose in words, as reports show it
    module: str | None = None
    stage: int | None = None
    microbatch: int | None = None


Describe = Callable[..., Description]


class AttributionLabels:
    """The labels of one log, each declared once in the run."""

    def __init__(self, recorder: Recorder) -> None:
        """Start without labels."""
        self.recorder = recorder
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, str], int] = {}
        self.known: dict[tuple[Any, ...], int] = {}
        """Ids by (describe, *parts), so that the hot path need not build the text again."""
        self._written: set[tuple[Any, ...]] = set()

    def id(self, api: str, text: str, **fields: str | int) -> int:
        """Return the id of a label, for `Recorder.set_label`; 0 (none) once the table of the run is full.

        Args:
            api: the framework in a word: ddp, fsdp, tp, pp.
            text: the purpose in words.
            fields: module, stage, microbatch, where they apply.
        """
        known = self._ids.get((api, text))
        if known is not None:
            return known
        with self._lock:
            if len(self._ids) >= schema.MAX_TABLE_ENTRIES:
                return 0
            new = len(self._ids) + 1
            if self._ids.setdefault((api, text), new) == new:
                self.recorder.write_entry(entry("label", id=new, api=api, text=text, **fields))
            return self._ids[api, text]

    def declare(self, describe: Describe, *parts: Any) -> int:
        """Return the id of the label `describe(*parts)`, and remember it in `known`."""
        description = describe(*parts)
        fields = {"module": description.module, "stage": description.stage, "microbatch": description.microbatch}
        new = self.id(
            description.api, description.text, **{key: value for key, value in fields.items() if value is not None}
        )
        if len(self.known) < schema.MAX_TABLE_ENTRIES:
            self.known[(describe, *parts)] = new
        return new

    def first_time(self, key: tuple[Any, ...]) -> bool:
        """Say whether an entry is new to the log; False also once the log holds as many as it may."""
        if key in self._written or len(self._written) >= schema.MAX_TABLE_ENTRIES:
            return False
        self._written.add(key)
        return True
