"""Read the arguments of c10d operators in a Python kernel."""

import functools
from types import FrameType
from typing import Any

from dtprof.records import schema

FLAG = schema.FLAG


@functools.cache
def dtype_codes() -> dict[Any, int]:
    """Return the code of each element type of this torch."""
    import torch

    return {dtype: code for code, (name, _) in enumerate(schema.DTYPES) if (dtype := getattr(torch, name, None))}


class CallFields:
    """The fields of a record that the arguments of one call determine."""

    __slots__ = ("dtype", "flags", "group", "inputs", "meta", "numel", "outputs", "peer", "reduce_op", "tag", "uneven")

    def __init__(self) -> None:
        """Start from the defaults of a call without arguments."""
        self.group: Any = None
        self.dtype = self.reduce_op = schema.NO_CODE
        self.flags = self.numel = self.tag = 0
        self.peer = -1
        self.meta = self.uneven = False
        self.inputs: list[int] = []
        self.outputs: list[int] = []


class ArgumentPositions:
    """Positions of an operator's arguments, by the names in its schema; callers omit trailing defaults."""

    def __init__(self, op: str, schema_arguments: list[Any]) -> None:
        """Find the positions."""
        import torch

        names = [argument.name for argument in schema_arguments]
        self.p2p = op == "send" or op.startswith("recv")
        self._empty = "barrier" in op

        def first(*wanted: str) -> int:
            return next((i for i, name in enumerate(names) if name.startswith(wanted) and "split" not in name), -1)

        self._group = first("process_group")
        self._reduce_op = first("reduce_op")
        self._peer = first("root_rank", "dst", "src")
        self._tag = first("tag")
        self._async = first("async_op", "asyncOp")
        self._async_default = self._async >= 0 and bool(schema_arguments[self._async].default_value)
        self._splits = [
            names.index(name) if name in names else -1 for name in ("input_split_sizes", "output_split_sizes")
        ]
        self._outputs = first("output")
        self._inputs = max(first("input"), 0)
        self._unbox_group = torch._C._distributed_c10d.ProcessGroup.unbox
        self._dtypes = dtype_codes()

    def __call__(self, arguments: tuple[Any, ...], caller: FrameType | None) -> CallFields:
        """Read one call; `caller` is the frame that called the operator."""
        call = CallFields()
        given = len(arguments)
        call.group = self._unbox_group(arguments[self._group])
        self._measure(call, arguments[self._inputs], call.inputs)
        if self._outputs >= 0:
            self._measure(call, arguments[self._outputs], call.outputs)
        if 0 <= self._peer < given:
            call.peer = int(arguments[self._peer])
        if 0 <= self._tag < given:
            call.tag = int(arguments[self._tag])
        if arguments[self._async] if 0 <= self._async < given else self._async_default:
            call.flags |= FLAG["async"]
        if 0 <= self._reduce_op < given:
            call.reduce_op = _reduce_op(arguments[self._reduce_op], caller)
        if self._empty:  # a barrier's tensor only selects the device: nothing of it is communicated
            call.dtype, call.inputs, call.outputs = schema.NO_CODE, [], []
        # A rank that only receives (broadcast, scatter) has no inputs.
        call.numel = sum(call.inputs) or sum(call.outputs)
        if not self.p2p and (self._splits[0] >= 0 or len(call.inputs) > 1 or len(call.outputs) > 1):
            self._compare(call, arguments)
        return call

    def _compare(self, call: CallFields, arguments: tuple[Any, ...]) -> None:
        """Note whether sizes differ between peers or tensors."""
        sizes = [call.inputs, call.outputs]
        for i, position in enumerate(self._splits):
            if 0 <= position < len(arguments) and arguments[position]:
                sizes[i] = list(arguments[position])
        if any(len(set(parts)) > 1 for parts in sizes):
            call.uneven, call.inputs, call.outputs = True, *sizes

    def _measure(self, call: CallFields, value: Any, sizes: list[int]) -> None:
        if value.__class__ is list:
            if len(value) != 1:
                for item in value:
                    self._measure(call, item, sizes)
                return
            value = value[0]
            if value.__class__ is list:
                self._measure(call, value, sizes)
                return
        if call.dtype == schema.NO_CODE:
            call.dtype = self._dtypes.get(value.dtype, schema.NO_CODE)
            if not value.is_cpu:
                call.meta = value.is_meta
                call.flags |= FLAG["device"]
        sizes.append(int(value._nnz()) if value.is_sparse else value.numel())


def _reduce_op(boxed: Any, caller: FrameType | None) -> int:
    """Return the code of a reduction.

    The calling function of torch.distributed holds the options in its local `opts`; reading that takes a third of the
    time of the boxed object's method. Calls from C++ have no such frame.
    """
    if caller is not None and "opts" in caller.f_code.co_varnames:
        reduction = getattr(caller.f_locals.get("opts"), "reduceOp", None)
        if reduction is not None:
            return int(reduction.op)
    try:
        return int(boxed.op())
    except (AttributeError, RuntimeError):
        return schema.NO_CODE
