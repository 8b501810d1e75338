"""The fast path of the Python hook: record methods of ProcessGroup without a kernel in Python.

A Python kernel costs ten microseconds before its first line: the dispatcher converts every argument into a Python
object and back. Calls of ProcessGroup's methods with dense CPU tensors on gloo are recorded here instead, from the
Python objects of their arguments, and skip the dispatch key of the kernel. All other calls (from C++, with other
tensors or back ends, under modes that intercept) take the kernels.

The skipped key, BackendSelect, has no other kernel for these operators. It has kernels for functions that create
tensors, which gloo, or a wrapper that checks it, may call on the calling thread, and on threads of its own, which
inherit that thread's state. The CPU key is included in its place: those kernels would redispatch there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from types import FrameType
from typing import Any

from dtprof import fence
from dtprof.capture.python_hook.event_log import EventLog, GroupCounters
from dtprof.capture.python_hook.operation_arguments import dtype_codes
from dtprof.capture.python_hook.segment_writer import AT, STATE, complete, pack_f32
from dtprof.capture.python_hook.work_waits import poll, watch
from dtprof.records import schema

ASYNC = schema.FLAG["async"]
OBSERVED = schema.FLAG["completion"] | schema.FLAG["polled"]
RETURNED, FAILED, RETURNED_AT = STATE["returned"], STATE["failed"], AT["returned_after"]
MARK = "_dtprof_shortcut"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of ProcessGroup and the operator that it calls; the options are its last argument."""

    op: str
    options: str | None = None
    """Their class; None for the peer and the tag of a point-to-point operation."""
    arity: int = 3
    """Number of arguments: tensors, or outputs and inputs; split sizes; options."""


METHODS = {
    "allreduce": Method(op="allreduce_", options="AllreduceOptions", arity=2),
    "broadcast": Method(op="broadcast_", options="BroadcastOptions", arity=2),
    "reduce": Method(op="reduce_", options="ReduceOptions", arity=2),
    "allgather": Method(op="allgather_", options="AllgatherOptions"),
    "_allgather_base": Method(op="_allgather_base_", options="AllgatherOptions"),
    "all_gather_single": Method(op="_allgather_base_", options="AllgatherOptions"),
    "reduce_scatter": Method(op="reduce_scatter_", options="ReduceScatterOptions"),
    "_reduce_scatter_base": Method(op="_reduce_scatter_base_", options="ReduceScatterOptions"),
    "reduce_scatter_single": Method(op="_reduce_scatter_base_", options="ReduceScatterOptions"),
    "gather": Method(op="gather_", options="GatherOptions"),
    "scatter": Method(op="scatter_", options="ScatterOptions"),
    "alltoall": Method(op="alltoall_", options="AllToAllOptions"),
    "alltoall_base": Method(op="alltoall_base_", options="AllToAllOptions", arity=5),
    "all_to_all_single": Method(op="alltoall_base_", options="AllToAllOptions", arity=5),
    "send": Method(op="send"),
    "recv": Method(op="recv_"),
}


def install(log: EventLog, ops: list[str]) -> None:
    """Replace the methods of ProcessGroup, where this torch has the functions needed for that."""
    import torch

    c10d = torch._C._distributed_c10d
    if not hasattr(torch._C, "_PreserveDispatchKeyGuard"):
        return
    for name, method in METHODS.items():
        original = getattr(c10d.ProcessGroup, name, None)
        options = getattr(c10d, method.options) if method.options else None
        if original is not None and method.op in ops and (options is None or hasattr(options, "asyncOp")):
            original = getattr(original, MARK, original)  # inherited from the parent of this forked process
            setattr(c10d.ProcessGroup, name, _recorded(log, original, method, options))


Described = tuple[int, int, int, int, int, int]
"""Element type, reduction, flags, peer, tag or id of sizes, number of elements."""


def _describer(log: EventLog, method: Method, options: type | None) -> Callable[[tuple[Any, ...]], Described | None]:
    """Return the function that reads the arguments of a call, or returns None for one that must take the kernel."""
    import torch

    plain, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    dtypes = dtype_codes()
    reduces, rooted = hasattr(options, "reduceOp"), hasattr(options, "rootRank")
    no_code, sizes_id, splits = schema.NO_CODE, log.sizes_id, method.arity == 5

    def is_ordinary(tensor: Any) -> bool:
        return tensor.__class__ in plain and tensor.is_cpu and tensor.layout is strided

    def measure(value: Any, sizes: list[int]) -> Any:
        """Append the number of elements of each tensor; return the type of the first, None if any is not ordinary."""
        tensors = value if value.__class__ is list else [value]
        if tensors and tensors[0].__class__ is list:
            if len(tensors) > 1:
                return None
            tensors = tensors[0]
        for tensor in tensors:
            if tensor.__class__ not in plain or not tensor.is_cpu or tensor.layout is not strided:
                return None
            sizes.append(tensor.numel())
        return tensors[0].dtype if tensors else no_code

    def read_options(given: Any) -> tuple[int, int, int]:
        reduction = int(given.reduceOp.op) if reduces else no_code
        return reduction, ASYNC if given.asyncOp else 0, given.rootRank if rooted else -1

    def describe_one(arguments: tuple[Any, ...]) -> Described | None:
        tensors, given = arguments
        if given.__class__ is not options or tensors.__class__ is not list or len(tensors) != 1:
            return None
        tensor = tensors[0]
        if not is_ordinary(tensor):
            return None
        return dtypes.get(tensor.dtype, no_code), *read_options(given), 0, tensor.numel()

    def describe_p2p(arguments: tuple[Any, ...]) -> Described | None:
        tensors, peer, tag = arguments
        if peer.__class__ is not int or tensors.__class__ is not list or len(tensors) != 1:
            return None
        tensor = tensors[0]
        if not is_ordinary(tensor):
            return None
        return dtypes.get(tensor.dtype, no_code), no_code, 0, peer, int(tag), tensor.numel()

    def describe_pair(arguments: tuple[Any, ...]) -> Described | None:
        if arguments[-1].__class__ is not options:
            return None
        inputs: list[int] = []
        outputs: list[int] = []
        dtype = measure(arguments[1], inputs)
        dtype_of_outputs = measure(arguments[0], outputs)
        if dtype is None or dtype_of_outputs is None:
            return None
        numel, tag = sum(inputs) or sum(outputs), 0
        if splits:
            inputs, outputs = list(arguments[3]) or inputs, list(arguments[2]) or outputs
        if (len(inputs) > 1 or len(outputs) > 1) and (len(set(inputs)) > 1 or len(set(outputs)) > 1):
            tag = sizes_id(inputs, outputs)
        return dtypes.get(dtype if inputs else dtype_of_outputs, no_code), *read_options(arguments[-1]), tag, numel

    return describe_p2p if options is None else describe_one if method.arity == 2 else describe_pair


def _recorded(log: EventLog, original: Callable[..., Any], method: Method, options: type | None) -> Callable[..., Any]:
    """Return a method that records a call and issues it without the kernel."""
    import torch

    state, key, cpu = torch._C, torch._C.DispatchKey.BackendSelect, torch._C.DispatchKey.CPU
    restore_keys, exclude, include = (
        state._PreserveDispatchKeyGuard,
        state._dispatch_tls_set_dispatch_key_excluded,
        state._dispatch_tls_set_dispatch_key_included,
    )
    modes, transforms = state._len_torch_dispatch_stack, state._functorch.peek_interpreter_stack
    frame_of, recording, group_of, arity = sys._getframe, log.recording, log.group, method.arity
    describe, write = _describer(log, method, options), log.writer(method.op, p2p=options is None)

    def begin(group: Any, arguments: tuple[Any, ...], caller: FrameType) -> tuple[Any, int, int] | None:
        """Record the issue of a call that may take the fast path; None for every other."""
        issued = monotonic_ns()
        # A dispatch mode or functorch transform must intercept the operator, which only the kernels let it do.
        if modes() or transforms() is not None:
            return None
        described = describe(arguments)
        if described is None:
            return None
        known: GroupCounters = group_of(group)
        if not known.gloo:
            return None
        poll()  # the Python hook has no thread of its own: each operation looks after those before it
        dtype, reduce_op, flags, peer, tag, numel = described
        claimed = write(issued, caller, known, dtype, reduce_op, flags | OBSERVED, peer, tag, numel)
        return None if claimed is None else (*claimed, issued)

    @fence.stands_in
    def recorded(self: Any, *arguments: Any, **named: Any) -> Any:
        event = None
        if recording() and len(arguments) == arity and not named:
            try:
                event = begin(self, arguments, frame_of(1))
            except Exception as error:
                fence.report("an operation", error)
        if event is None:
            try:
                return original(self, *arguments, **named)
            except BaseException as error:
                fence.hide_frame(error)
                raise
        memory, at, issued = event
        try:
            with restore_keys():
                exclude(key, True)
                include(cpu, True)
                work = original(self, *arguments)
        except BaseException as error:  # the job's own, KeyboardInterrupt included: recorded and raised again
            fence.hide_frame(error)
            pack_f32(memory, at + RETURNED_AT, monotonic_ns() - issued)
            complete(memory, at, issued, FAILED)
            raise
        pack_f32(memory, at + RETURNED_AT, monotonic_ns() - issued)
        memory[at] = RETURNED
        watch(work, memory, at, issued)
        return work

    recorded.__name__ = original.__name__
    recorded.__qualname__ = getattr(original, "__qualname__", original.__name__)
    recorded.__doc__ = original.__doc__
    setattr(recorded, MARK, original)
    _hide_from_dynamo(recorded)
    return recorded


def _hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Keep torch.compile from compiling this function and its callees after a graph break."""
    import torch

    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
