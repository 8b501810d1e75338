"""Record that a process takes part in torch.distributed.rpc, and how long its calls block it."""

import functools
from typing import Any

from dtprof.capture.attribution_labels import AttributionLabels
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.records import events

_CALLS = {"rpc_sync": "rpc_sync", "shutdown": "rpc shutdown"}


class RemoteCalls:
    """Hooks into RPC; a parameter server that steps no optimizer leaves a log by them."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution

    def install(self) -> None:
        """Wait for the job to import RPC."""
        self._attribution.after_import("torch.distributed.rpc", self._hook)

    def _hook(self, module: Any) -> None:
        around = self._attribution.around
        around(module, "init_rpc", functools.partial(self._begin, "init_rpc"), self._end)
        for name, phase in _CALLS.items():
            around(module.api, name, functools.partial(self._begin, phase), self._end)

    def _begin(self, phase: str, *_: Any, **__: Any) -> tuple[AttributionLabels, int] | None:
        labels = self._attribution.labels()
        if labels is None:
            return None
        recorder = labels.recorder
        return labels, recorder.begin_span(recorder.name_id(events.USER_PHASE + phase), False, -1, 0)

    @staticmethod
    def _end(started: tuple[AttributionLabels, int] | None, failed: bool) -> None:
        if started is not None:
            started[0].recorder.end_span(started[1], failed, 0, False)
