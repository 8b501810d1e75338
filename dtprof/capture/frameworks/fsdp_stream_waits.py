"""Mark where the stream that computes waits for collectives of FSDP, which run on streams of their own.

FSDP lets it wait for an event behind the collective, or for the other stream, not for the handle, so that no hook of
handles sees the wait. The marks lie where FSDP enqueues these waits. FSDP2: before parameters are copied out of an
all-gather, before a reduce-scatter takes the buffer of an earlier one, and at the end of the backward pass. FSDP1:
before a module uses its gathered flat parameter, and at the end of the backward pass. Nothing is waited for here.
"""

import threading
import weakref
from collections import deque
from typing import Any

from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.fsdp_hooks import after_reduce_scatter

MOST_PENDING = 16
"""Reduce-scatters of a backward pass that are remembered; FSDP2 keeps the buffers of one or two."""


class StreamWaits:
    """Hooks into the parameter groups of FSDP2 and the flat parameters of FSDP1."""

    def __init__(self, attribution: Attribution) -> None:
        """Record through the log of `attribution`."""
        self._attribution = attribution
        self._waiting = threading.local()
        """`handles`: of the waits that are being enqueued; `flat`: the flat parameter that is to be waited for."""
        self._gathers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """The all-gather that each parameter group, or handle of a flat parameter, is to wait for."""
        self._scatters: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        """The reduce-scatters of the running backward pass, by what the groups of a model share."""
        self._reductions: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        """The last reduction of it, by what the groups, or flat parameters, share; with HSDP its all-reduce, too."""

    def install(self) -> None:
        """Wait for the job to import FSDP."""
        after_import = self._attribution.after_import
        after_import("torch.distributed.fsdp._fully_shard._fsdp_param_group", self._hook_param_groups)
        after_import("torch.distributed.fsdp._fully_shard._fsdp_param", self._hook_params)
        after_reduce_scatter(self._attribution, self._after_reduce_scatter)
        after_import("torch.distributed.fsdp._runtime_utils", self._hook_runtime)
        after_import("torch.distributed.fsdp._exec_order_utils", self._hook_iterations)

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

    def _hook_runtime(self, module: Any) -> None:
        around = self._attribution.around
        around(module, "_unshard", self._begin_flat_unshard, self._end_flat_unshard)
        around(module, "_pre_forward_unshard", self._begin_forward_wait, self._end_flat_wait)
        around(module, "_pre_backward_hook", self._begin_backward_wait, self._end_flat_wait)
        # The first thing after the wait for an all-gather.
        around(module, "_prefetch_handle", self._end_wait, lambda *_: None)
        around(module, "_reduce_grad", self._begin_flat_reduction, self._end_flat_reduction)
        around(module, "_reduce_grad_no_shard", self._begin_flat_reduction, self._end_flat_reduction)
        # HYBRID_SHARD calls this between its reduce-scatter and its all-reduce.
        self._attribution.after(module, "_no_dispatch_record_stream", self._after_flat_reduction)
        around(module, "_post_backward_final_callback", self._begin_last_flat_wait, self._end_wait)

    def _hook_iterations(self, module: Any) -> None:
        # The first thing after the wait for the reductions.
        self._attribution.around(module._ExecOrderData, "next_iter", self._end_wait, lambda *_: None)

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
            self._reductions[context] = [operation]

    def _end_post_backward(self, context: Any, failed: bool) -> None:
        self._end_wait()
        self._waiting.context = None
        operation = self._take_operation()
        if operation and not failed:
            self._reductions.setdefault(context, []).append(operation)

    def _begin_final_wait(self, param_group: Any, *_: Any, **__: Any) -> None:
        context = param_group.comm_ctx
        self._scatters.pop(context, None)
        self._begin_wait(*self._reductions.pop(context, ()))

    def _begin_flat_unshard(self, _: Any, handle: Any, *__: Any, **___: Any) -> Any:
        self._take_operation()
        return handle

    def _end_flat_unshard(self, handle: Any, failed: bool) -> None:
        operation = self._take_operation()
        if operation and handle is not None and not failed:
            self._gathers[handle] = operation
            if getattr(self._waiting, "flat", None) is handle:
                self._begin_wait(self._gathers.pop(handle))

    def _begin_forward_wait(self, _: Any, handle: Any, *__: Any, **___: Any) -> None:
        if handle is not None:
            self._waiting.flat = handle
            if handle._prefetched:
                self._begin_wait(self._gathers.pop(handle, None))

    def _begin_backward_wait(self, _: Any, __: Any, handle: Any, *___: Any, **____: Any) -> None:
        if handle is not None and handle._needs_pre_backward_unshard and not handle._ran_pre_backward_hook:
            self._begin_forward_wait(None, handle)

    def _end_flat_wait(self, *_: Any) -> None:
        self._waiting.flat = None
        self._end_wait()

    def _begin_flat_reduction(self, state: Any, *_: Any, **__: Any) -> Any:
        self._take_operation()
        self._waiting.reduced = []
        return state._exec_order_data

    def _after_flat_reduction(self, *_: Any, **__: Any) -> None:
        reduced = getattr(self._waiting, "reduced", None)
        if reduced is not None and (operation := self._take_operation()):
            reduced.append(operation)

    def _end_flat_reduction(self, shared: Any, failed: bool) -> None:
        self._after_flat_reduction()
        reduced, self._waiting.reduced = getattr(self._waiting, "reduced", None), None
        if reduced and shared is not None and not failed:
            self._reductions[shared] = reduced

    def _begin_last_flat_wait(self, root_state: Any, *_: Any, **__: Any) -> None:
        self._begin_wait(*self._reductions.pop(root_state._exec_order_data, ()))

    def _take_operation(self) -> Any:
        labels = self._attribution.labels()
        return labels.recorder.take_last_operation() if labels is not None else None

    def _begin_wait(self, *operations: Any) -> None:
        labels = self._attribution.labels()
        if labels is not None:
            begin = labels.recorder.begin_wait
            self._waiting.handles = [handle for operation in operations if operation and (handle := begin(operation))]

    def _end_wait(self, *_: Any, **__: Any) -> None:
        handles = getattr(self._waiting, "handles", None)
        labels = self._attribution.labels()
        if handles and labels is not None:
            self._waiting.handles = []
            for handle in reversed(handles):
                labels.recorder.end_span(handle, False, 0, False)
