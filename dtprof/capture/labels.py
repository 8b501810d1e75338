"""Labels: on whose behalf a framework makes an operation."""

import threading

from dtprof.capture.entries import entry
from dtprof.capture.recorder import Recorder
from dtprof.run_format import schema


class Labels:
    """The labels of this process, each declared once in the run."""

    def __init__(self, recorder: Recorder) -> None:
        """Start with none."""
        self._recorder = recorder
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, str], int] = {}

    def id(self, api: str, text: str, **fields: str | int) -> int:
        """Return the id of a label, for `Recorder.set_label`; 0 (none) once the run has as many as it may have.

        Args:
            api: the framework in a word: ddp, fsdp, tp, pp.
            text: what is done for what, in words.
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
                self._recorder.write_entry(entry("label", id=new, api=api, text=text, **fields))
            return self._ids[api, text]
