"""The Python hook: the same records as the native one, for machines without a compiler.

Kernels at DispatchKey.BackendSelect, registered through torch.library, see each c10d operation once on its way to
whatever back end and redispatch with the GIL released. Calling the back end's kernel directly instead would hold the
GIL and deadlock with gloo's own threads.
"""

import mmap
import sys
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from dtprof import fence
from dtprof.capture.python_hook import fast_path
from dtprof.capture.python_hook.event_log import FLAG, EventLog
from dtprof.capture.python_hook.operation_arguments import ArgumentPositions
from dtprof.capture.python_hook.segment_writer import AT, STATE, complete, pack_f32
from dtprof.capture.python_hook.work_waits import poll, watch, watch_waits

WAITED_IN_CPP = {"reduce_scatter_tensor_coalesced_"}
"""Operations without a future whose wait Python cannot observe either: their completion is unknown."""


_libraries: list[Any] = []
"""The registration of the kernels: torch removes them when it is garbage."""


def _keep_until_exit(library: Any) -> None:
    """Keep torch from removing the kernels in its exit handler: later handlers may issue operations."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] is library:
            finalizer.atexit = False


class PythonHook(EventLog):
    """An event log filled by kernels in Python."""

    def install(self, ops: list[str]) -> None:
        """Hook these operators of the c10d namespace."""
        import torch.library

        watch_waits(torch._C._distributed_c10d.Work)
        for inherited in _libraries:  # from the parent of this forked process
            inherited._destroy()
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        _libraries[:] = [library]
        _keep_until_exit(library)
        for op in ops:
            library.impl(op, self._kernel(op), "BackendSelect", with_keyset=True)
        fast_path.install(self, ops)

    def _kernel(self, name: str) -> Callable[..., Any]:
        """Return the kernel of one operator, in as few Python frames as possible: each costs."""
        import torch

        overload = getattr(torch.ops.c10d, name).default
        redispatch = overload._handle.redispatch_boxed
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        has_return = len(overload._schema.returns) > 0
        issue = self._issuer(name, ArgumentPositions(name, overload._schema.arguments))
        unbox_work = torch._C._distributed_c10d.Work.unbox
        returned_state = STATE["returned"] if has_return else STATE["done"]
        returned_at, flags_at = AT["returned_after"], AT["flags"]

        def kernel(keys: Any, *arguments: Any) -> Any:
            event = None
            if self._on:
                try:
                    event = issue(arguments)
                except Exception as error:
                    fence.report("an operation", error)
            if event is None:
                try:
                    return redispatch(keys & below, *arguments)
                except BaseException as error:
                    fence.hide_frame(error)
                    raise
            memory, at, issued, observe = event
            try:
                result = redispatch(keys & below, *arguments)
            except BaseException as error:
                fence.hide_frame(error)
                pack_f32(memory, at + returned_at, monotonic_ns() - issued)
                complete(memory, at, issued, STATE["failed"])
                raise
            pack_f32(memory, at + returned_at, monotonic_ns() - issued)
            memory[at] = returned_state
            if has_return:
                try:
                    boxed = result[-1] if result.__class__ in (tuple, list) else result
                    work = unbox_work(boxed) if boxed is not None else None
                    if work is None:
                        memory[at + flags_at] |= FLAG["no_work"]
                    elif observe:
                        watch(work, memory, at, issued)
                except Exception as error:
                    fence.report("the completion of an operation", error)
            return result

        return kernel

    def _issuer(self, name: str, describe: ArgumentPositions) -> Callable[..., tuple[mmap.mmap, int, int, bool] | None]:
        """Return the function that records the issue of one operator."""
        write = self.writer(name, p2p=describe.p2p)
        observed = FLAG["polled"] | FLAG["completion"] if name not in WAITED_IN_CPP else 0
        on_device = FLAG["device"]
        groups, frame_of = self._groups, sys._getframe

        def issue(arguments: tuple[Any, ...]) -> tuple[mmap.mmap, int, int, bool] | None:
            issued = monotonic_ns()
            poll()
            caller = frame_of(2) if frame_of(1).f_back is not None else None
            call = describe(arguments, caller)
            if call.meta:
                return None  # fake tensors: nothing is communicated
            group = groups.get(call.group) or self._new_group(call.group)
            flags = call.flags
            observe = group.gloo and not flags & on_device and observed != 0
            if observe:
                flags |= observed
            tag = self.sizes_id(call.inputs, call.outputs) if call.uneven else call.tag
            claimed = write(issued, caller, group, call.dtype, call.reduce_op, flags, call.peer, tag, call.numel)
            return None if claimed is None else (*claimed, issued, observe)

        return issue
