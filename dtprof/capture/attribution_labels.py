"""Labels: on whose behalf a framework makes an operation."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry
from dtprof.records import schema


class Description(NamedTuple):
    """What a label says."""

    api: str  # the framework in a word: ddp, fsdp, tp, pp
    text: str  # what is done for what, in words
    module: str | None = None
    stage: int | None = None
    microbatch: int | None = None


Describe = Callable[..., Description]


class Labels:
    """The labels of one log, each declared once in the run."""

    def __init__(self, recorder: Recorder) -> None:
        """Start with none."""
        self.recorder = recorder
        self._lock = threading.Lock()
        self._ids: dict[tuple[str, str], int] = {}
        self.known: dict[tuple[Any, ...], int] = {}
        """Ids by (describe, *parts), for those who ask often."""
        self._said: set[tuple[Any, ...]] = set()

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
                self.recorder.write_entry(entry("label", id=new, api=api, text=text, **fields))
            return self._ids[api, text]

    def declare(self, describe: Describe, *parts: Any) -> int:
        """Return the id of the label that `describe(*parts)` gives, and keep it in `known`."""
        said = describe(*parts)
        fields = {"module": said.module, "stage": said.stage, "microbatch": said.microbatch}
        new = self.id(said.api, said.text, **{key: value for key, value in fields.items() if value is not None})
        if len(self.known) < schema.MAX_TABLE_ENTRIES:
            self.known[describe, *parts] = new
        return new

    def first_time(self, said: tuple[Any, ...]) -> bool:
        """Say whether this has not been written to the log before; False once it holds as much as it may."""
        if said in self._said or len(self._said) >= schema.MAX_TABLE_ENTRIES:
            return False
        self._said.add(said)
        return True
