"""Mark where the stream that computes waits for collectives of FSDP2, which run on streams of their own.

FSDP2 lets it wait for an event behind the collective, not for the handle, so that no hook of handles sees the wait. The
marks lie where FSDP2 enqueues these waits: before parameters are copied out of an all-gather, before a reduce-scatter
takes the buffer of an earlier one, and at the end of the backward pass. Nothing is waited for here.
"""

import threading
import weakref
from collections import deque
from typing import Any

from dtprof.capture.frameworks.attribution import Attribution

MOST_PENDING = 16
"""Reduce-scatters of a backward pass that are remembered; FSDP2 keeps the buffers of one or two."""


class StreamWaits:
    """Hooks into the parameter groups of FSDP2."""

    def __init__(self, attribution: Attribution) -> None:
        """Record through the log of `attribution`."""
        self._attribution = attribution
        self._waiting = threading.local()
        """`handle`: of the wait that is being enqueued; 0 for none."""
        self._gathers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """The all-gather that each parameter group is to wait for."""
        self._scatters: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        """The reduce-scatters of the running backward pass, by what the groups of a model share."""
        self._reductions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """The last reduction of it, which may be an all-reduce (HSDP)."""

    def install(self) -> None:
        """Wait for the job to import FSDP2."""
        after_import = self._attribution.after_import
        after_import("torch.distributed.fsdp._fully_shard._fsdp_param_group", self._hook_param_groups)
        after_import("torch.distributed.fsdp._fully_shard._fsdp_param", self._hook_params)
        after_import("torch.distributed.fsdp._fully_shard._fsdp_collectives", self._hook_reduce_scatters)

    def _hook_param_groups(self, module: Any) -> None:
        group, around = module.FSDPParamGroup, self._attribution.around
        around(group, "unshard", self._begin_unshard, self._end_unshard)
        around(group, "wait_for_unshard", self._begin_gather_wait, self._end_wait)
        around(group, "post_backward", self._begin_post_backward, self._end_post_backward)
        around(group, "_wait_for_post_backward", lambda *_: None, self._end_wait)
        around(group, "finalize_backward", self._begin_final_wait, self._end_wait)

    def _hook_params(self, module: Any) -> None:
        # The first thing after the wait for an all-gather.
        self._attribution.around(module.FSDPParam, "init_all_gather_outputs", self._end_wait, lambda *_: None)

    def _hook_reduce_scatters(self, module: Any) -> None:
        for name in ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter"):
            if hasattr(module, name):
                self._attribution.after(getattr(module, name), "__call__", self._after_reduce_scatter)

    # ---- all-gathers ---------------------------------------------------------------------------------------------

    def _begin_unshard(self, param_group: Any, *_: Any, **__: Any) -> Any:
        self._take_operation()
        return param_group

    def _end_unshard(self, param_group: Any, failed: bool) -> None:
        operation = self._take_operation()
        if operation and not failed:
            self._gathers[param_group] = operation

    def _begin_gather_wait(self, param_group: Any, *_: Any, **__: Any) -> None:
        if param_group._all_gather_result is not None:
            self._begin_wait(self._gathers.pop(param_group, None))

    # ---- reductions ----------------------------------------------------------------------------------------------

    def _begin_post_backward(self, param_group: Any, *_: Any, **__: Any) -> Any:
        context = param_group.comm_ctx
        self._take_operation()
        self._waiting.context = context
        pending = self._scatters.get(context)
        buffers = getattr(context, "reduce_scatter_max_input_buffers", 1)
        if pending is not None and len(pending) >= buffers:
            self._begin_wait(pending[-buffers])
        return context

    def _after_reduce_scatter(self, *_: Any, **__: Any) -> None:
        context = getattr(self._waiting, "context", None)
        operation = self._take_operation()
        if operation and context is not None:
            self._scatters.setdefault(context, deque(maxlen=MOST_PENDING)).append(operation)
            self._reductions[context] = operation

    def _end_post_backward(self, context: Any, failed: bool) -> None:
        self._end_wait()
        self._waiting.context = None
        operation = self._take_operation()
        if operation and not failed:
            self._reductions[context] = operation

    def _begin_final_wait(self, param_group: Any, *_: Any, **__: Any) -> None:
        context = param_group.comm_ctx
        self._scatters.pop(context, None)
        self._begin_wait(self._reductions.pop(context, None))

    # ---- marks ---------------------------------------------------------------------------------------------------

    def _take_operation(self) -> Any:
        labels = self._attribution.labels()
        return labels.recorder.take_last_operation() if labels is not None else None

    def _begin_wait(self, operation: Any) -> None:
        labels = self._attribution.labels()
        if operation and labels is not None:
            self._waiting.handle = labels.recorder.begin_wait(operation)

    def _end_wait(self, *_: Any, **__: Any) -> None:
        handle = getattr(self._waiting, "handle", 0)
        labels = self._attribution.labels()
        if handle and labels is not None:
            self._waiting.handle = 0
            labels.recorder.end_span(handle, False, 0, False)
