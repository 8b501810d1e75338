"""A shorter way to the record for the calls that Python programs make most.

A Python kernel costs ten microseconds before it does anything: the dispatcher turns every argument into a Python object
and back. Calls of ProcessGroup's own methods with one dense CPU tensor on gloo are recorded here instead, from the
Python objects they already have, and pass the kernel's dispatch key by. Nothing else is skipped: the key has no other
kernel for these operators, and for such a tensor gloo makes no new tensor, neither on the calling thread nor on its
own, which takes over the state of the calling one: that would need the key. Everything else (C++ callers, other
tensors, other back ends, averages, modes that intercept) takes the kernels.
"""

import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from dtprof import fence
from dtprof.capture.python.segments import AT, STATE, complete, pack_f32
from dtprof.capture.python.waits import poll, watch
from dtprof.run_format import schema

if TYPE_CHECKING:
    from types import FrameType

    from dtprof.capture.python.tap import Group, PythonTap

FLAG = schema.FLAG
OBSERVED = FLAG["completion"] | FLAG["polled"]
RETURNED, FAILED, RETURNED_AT = STATE["returned"], STATE["failed"], AT["returned_after"]
MARK = "_dtprof_shortcut"
REDUCED_IN_PLACE = {schema.REDUCE_OPS.index(name) for name in ("sum", "product", "min", "max", "band", "bor", "bxor")}
REDUCED_IN_PLACE.add(schema.NO_CODE)
"""What gloo reduces without a new tensor: for an average it divides by one."""


class Reader(Protocol):
    """Reads what the record needs from the arguments after the tensors."""

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[int, int, int, int]:
        """Return reduction, flags, peer and tag."""


def _read_allreduce(arguments: tuple[Any, ...]) -> tuple[int, int, int, int]:
    options = arguments[1]
    return int(options.reduceOp.op), FLAG["async"] if options.asyncOp else 0, -1, 0


def _read_broadcast(arguments: tuple[Any, ...]) -> tuple[int, int, int, int]:
    options = arguments[1]
    return schema.NO_CODE, FLAG["async"] if options.asyncOp else 0, options.rootRank, 0


def _read_p2p(arguments: tuple[Any, ...]) -> tuple[int, int, int, int]:
    return schema.NO_CODE, 0, int(arguments[1]), int(arguments[2])


METHODS: dict[str, tuple[str, int, str, Reader]] = {
    "allreduce": ("allreduce_", 2, "AllreduceOptions", _read_allreduce),
    "broadcast": ("broadcast_", 2, "BroadcastOptions", _read_broadcast),
    "send": ("send", 3, "int", _read_p2p),
    "recv": ("recv_", 3, "int", _read_p2p),
}
"""By method: the operator, its number of arguments, the type of the second, how they are read."""


def install(tap: "PythonTap", ops: list[str]) -> None:
    """Give ProcessGroup's methods the shorter way, where this torch has what it needs."""
    import torch

    c10d = torch._C._distributed_c10d
    if not hasattr(torch._C, "_dispatch_tls_set_dispatch_key_excluded"):
        return
    for method, (op, arity, second_type, read) in METHODS.items():
        original = getattr(c10d.ProcessGroup, method)
        original = getattr(original, MARK, original)  # inherited from the parent of this forked process
        second = int if second_type == "int" else getattr(c10d, second_type)
        if op in ops and (second is int or hasattr(second, "asyncOp")):
            setattr(c10d.ProcessGroup, method, _recorded(tap, original, op, arity, second, read))


def _recorded(
    tap: "PythonTap", original: Callable[..., Any], op: str, arity: int, second: type, read: Reader
) -> Callable[..., Any]:
    """Return a method that records a call and makes it, passing the kernel by."""
    import torch

    exclude, key = torch._C._dispatch_tls_set_dispatch_key_excluded, torch._C.DispatchKey.BackendSelect
    modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
    plain, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    dtypes = {dtype: code for code, (name, _) in enumerate(schema.DTYPES) if (dtype := getattr(torch, name, None))}
    frame_of, recording, group_of = sys._getframe, tap.recording, tap.group
    write = tap.writer(op, p2p=second is int)

    def begin(group: Any, arguments: tuple[Any, ...], caller: "FrameType") -> tuple[Any, int, int] | None:
        """Record the issue of a call that may take the shorter way; None for every other."""
        tensors = arguments[0]
        if arguments[1].__class__ is not second or tensors.__class__ is not list or len(tensors) != 1:
            return None
        tensor = tensors[0]
        if (
            tensor.__class__ not in plain
            or not tensor.is_cpu
            or tensor.layout is not strided
            or modes()
            or transforms() is not None
        ):
            return None
        issued = monotonic_ns()
        known: Group = group_of(group)
        if not known.gloo:
            return None
        reduce_op, flags, peer, tag = read(arguments)
        if reduce_op not in REDUCED_IN_PLACE:
            return None
        poll()
        dtype = dtypes.get(tensor.dtype, schema.NO_CODE)
        claimed = write(issued, caller, known, dtype, reduce_op, flags | OBSERVED, peer, tag, tensor.numel())
        return None if claimed is None else (*claimed, issued)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        event = None
        if recording() and len(arguments) == arity and not options:
            try:
                event = begin(self, arguments, frame_of(1))
            except Exception as error:
                fence.report("an operation", error)
        if event is None:
            return original(self, *arguments, **options)
        memory, at, issued = event
        try:
            exclude(key, True)
            work = original(self, *arguments)
        except BaseException:
            pack_f32(memory, at + RETURNED_AT, monotonic_ns() - issued)
            complete(memory, at, issued, FAILED)
            raise
        finally:
            exclude(key, False)
        pack_f32(memory, at + RETURNED_AT, monotonic_ns() - issued)
        memory[at] = RETURNED
        watch(work, memory, at, issued)
        return work

    method.__name__ = original.__name__
    method.__qualname__ = getattr(original, "__qualname__", original.__name__)
    method.__doc__ = original.__doc__
    setattr(method, MARK, original)
    _hide_from_dynamo(method)
    return method


def _hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Keep torch.compile from compiling this function, and what it calls, where a graph breaks before it."""
    import torch

    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
