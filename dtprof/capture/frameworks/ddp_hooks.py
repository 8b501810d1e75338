"""Label the operations of DistributedDataParallel, and record the buckets that its reducer reduces in C++.

The reducer issues one all_reduce a bucket in the order of buckets, without a Python frame. The reader of the run
matches them by order and size within a backward pass.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from dtprof import fence
from dtprof.capture.attribution_labels import AttributionLabels
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.group_descriptions import name_of
from dtprof.capture.string_entries import timed_entry
from dtprof.records.sites import Label

CHECKED_FORWARDS = 4
"""Forward passes of reducing steps that check the buckets: DDP rebuilds them at most once, before the second, and
reports that in the third."""
_BY = "torch.nn.parallel.DistributedDataParallel"


def _doing(what: str) -> Label:
    return Label("ddp", f"ddp {what}")


def _bucket(index: int, nbytes: int) -> Label:
    return Label("ddp", f"ddp bucket {index}, {nbytes / (1 << 20):.3g} MiB")


class DataParallel:
    """Hooks into DistributedDataParallel."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution
        self._ids: weakref.WeakKeyDictionary[Any, tuple[AttributionLabels, int]] = weakref.WeakKeyDictionary()
        self._num_ids = 0
        self._forwards: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Wait for the job to import DistributedDataParallel."""
        self._attribution.after_import("torch.nn.parallel.distributed", self._hook)
        self._attribution.after_import("torch.distributed", self._hook_registration)

    def _hook(self, module: Any) -> None:
        ddp, around = module.DistributedDataParallel, self._attribution.around
        doings = {
            "__init__": "set-up",
            "_sync_module_buffers": "broadcast of buffers",
            "_check_global_requires_backward_grad_sync": "check of gradient synchronisation",
        }
        for name, doing in doings.items():
            around(ddp, name, functools.partial(self._begin, doing))
        around(module, "_sync_module_states", functools.partial(self._begin, "broadcast of parameters and buffers"))
        around(ddp, "_pre_forward", self._begin_forward, self._end_forward)
        self._attribution.after(ddp, "__init__", lambda _, created, *__, **___: self._note_wrapped(created))

    def _begin(self, doing: str, *_: Any, **__: Any) -> int:
        return self._attribution.begin(_doing, doing)

    def _begin_forward(self, ddp: Any, *_: Any, **__: Any) -> tuple[Any, int]:
        return ddp, self._attribution.begin(_doing, "rebuild of buckets")

    def _end_forward(self, started: tuple[Any, int] | None, failed: bool) -> None:
        if started is None:
            return
        import torch

        ddp, before = started
        self._attribution.end(before, failed)
        checked = self._forwards.get(ddp, 0)
        if checked < CHECKED_FORWARDS and ddp.require_backward_grad_sync and torch.is_grad_enabled():
            self._forwards[ddp] = checked + 1
            self._note_buckets(ddp)

    def _note_wrapped(self, ddp: Any) -> None:
        self._note_buckets(ddp)
        ignored = getattr(ddp, "parameters_to_ignore", ())
        named = ddp.module.named_parameters()
        names = (name for name, parameter in named if parameter.requires_grad and name not in ignored)
        self._attribution.declare_parameters(ddp.process_group, names, "DistributedDataParallel")

    def _note_buckets(self, ddp: Any) -> None:
        """Write the buckets of the reducer, unless these are written."""
        labels = self._attribution.labels()
        if labels is None:
            return
        known = self._ids.get(ddp)
        if known is None or known[0] is not labels:
            self._num_ids += 1
            known = self._ids[ddp] = labels, self._num_ids
        data = ddp._get_ddp_logging_data()
        sizes = _numbers(data.get("rebuilt_bucket_sizes", "")) or _numbers(data.get("bucket_sizes", ""))
        group = name_of(ddp.process_group)
        if labels.first_time(("ddp", known[1], sizes)):
            parameters = int(data.get("num_parameter_tensors", 0))
            labels.recorder.write_entry(
                timed_entry("ddp", id=known[1], group=group, buckets=sizes, parameters=parameters)
            )
        self._attribution.declare_use(group, "dp", _BY)

    def _hook_registration(self, module: Any) -> None:
        """Label the operations of a Python communication hook by the bucket that it reduces."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @fence.stands_in
            @functools.wraps(original)
            def register(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
                try:
                    return original(reducer, state, self._labelled(hook))
                except BaseException as error:
                    fence.hide_frame(error)
                    raise

            return register

        self._attribution.replace(module, "_register_comm_hook", make)

    def _labelled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        begin = fence.fenced("attribution to a communication hook")(
            lambda bucket: self._attribution.begin(_bucket, bucket.index(), bucket.buffer().nbytes)
        )

        @fence.stands_in
        @functools.wraps(hook)
        def labelled(state: Any, bucket: Any) -> Any:
            before = begin(bucket)
            try:
                return hook(state, bucket)
            except BaseException as error:
                fence.hide_frame(error)
                raise
            finally:
                self._attribution.end(before)

        return labelled


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the format of DDP's logger."""
    return tuple(int(part) for part in str(text).replace(" ", "").split(",") if part.isdigit())
