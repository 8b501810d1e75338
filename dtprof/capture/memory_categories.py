"""Attribute memory to parameters, gradients, optimizer state, activations and communication.

The models and optimizers are those that the job steps. Nothing here keeps a tensor alive: sizes are summed at once,
models and optimizers are referenced weakly.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from time import monotonic_ns
from typing import Any

from dtprof import fence
from dtprof.capture import reduction_buffers
from dtprof.capture.forward_passes import Forward
from dtprof.capture.live_objects import LiveObjects
from dtprof.capture.spans import Spans
from dtprof.records import events

FAKE = "meta"
"""The device of the storage of a fake tensor, whatever device the tensor itself shows."""


class Categories:
    """Memory by category; activations only of the steps that are watched."""

    def __init__(self, forward: Forward, live_bytes: Callable[[], int | None]) -> None:
        """Start without models; `live_bytes` returns the bytes allocated where the model lies."""
        self._forward = forward
        self._live_bytes = live_bytes
        self.optimizers = LiveObjects()
        self.watching = False
        self.cost_ns = 0
        """Time spent on measuring the watched step so far: each of its backward passes adds to it."""
        self._baseline: int | None = None
        self._activations: int | None = None
        self._gradients: int | None = None
        self._reducing: int | None = None

    def install(self, spans: Spans) -> None:
        """Hook forward and backward passes, and steps of optimizers."""
        self._forward.before_forward(self._before_forward)
        spans.before(events.BACKWARD, self._before_backward)
        spans.before(events.OPTIMIZER, self._before_optimizer)

    @fence.fenced("the memory of activations")
    def watch(self, watching: bool) -> None:
        """Watch the step that begins, or stop watching."""
        self.watching = watching
        self.cost_ns = 0
        self._baseline = self._activations = self._gradients = self._reducing = None

    @fence.fenced("the memory of activations")
    def _before_forward(self) -> None:
        if self.watching and self._baseline is None:
            with self._timed():
                held = self._live_bytes()
                # Gradients of earlier microbatches are live now and grow in backward: they count in neither sum. Nor do
                # buffers of reductions: DeepSpeed takes them before the backward pass.
                self._baseline = None if held is None else held - self._gradient_bytes() - self._reduction_bytes()

    @fence.fenced("the memory of activations")
    def _before_backward(self) -> None:
        if self.watching and self._baseline is not None:
            with self._timed():
                held = self._live_bytes()
                if held is not None:
                    reducing = self._reduction_bytes()
                    self._reducing = max(self._reducing or 0, reducing)
                    grown = held - self._gradient_bytes() - reducing - self._baseline
                    self._activations = max(self._activations or 0, grown)

    @fence.fenced("the memory of gradients")
    def _before_optimizer(self) -> None:
        if self.watching:
            with self._timed():
                self._gradients = max(self._gradients or 0, self._gradient_bytes())

    def at_step_end(self) -> dict[str, int]:
        """Return the bytes held by each known category; of gradients what optimizers stepped.

        A step may end behind the optimizer, where a program has freed its gradients.
        """
        with self._timed():
            held = self.held()
        if held and self._gradients is not None:
            held["gradients"] = max(held["gradients"], self._gradients)
        if self._activations is not None:
            held["activations"] = self._activations
        if "communication" in held and self._reducing is not None:
            held["communication"] = max(held["communication"], self._reducing)
        return held

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began_ns = monotonic_ns()
        try:
            yield
        finally:
            self.cost_ns += monotonic_ns() - began_ns

    def held(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients, optimizer state and communication now."""
        optimizers, parameters = list(self.optimizers), list(self._parameters())
        if not parameters:
            return {}
        device = _device_of(parameters[0])
        states = [*self._copies(), *(state for optimizer in optimizers for state in optimizer.state.values())]
        of_parameters = _storages(parameters, device)
        of_state = _storages((tensor for state in states for tensor in _tensors_in(state)), device)
        for shared in of_parameters.keys() & of_state.keys():  # an optimizer may step views of the parameters
            del of_state[shared]
        held = {
            "parameters": sum(of_parameters.values()),
            "gradients": _storage_bytes(map(_gradient_of, (*parameters, *self._copies())), device),
            "optimizer_state": sum(of_state.values()),
        }
        communication = self._communication_bytes()
        if communication is not None:
            held["communication"] = communication
        return held

    def names(self) -> dict[int, tuple[str, str]]:
        """Return category and name of the storages that models and optimizers hold now, by address."""
        names: dict[int, tuple[str, str]] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                shape = "x".join(map(str, getattr(parameter, "shape", ())))
                for tensor in _tensors_in(state):
                    _name(names, tensor, "optimizer_state", f"state of a parameter of {shape}")
        for module in self._models():
            for name, parameter in _named_tensors(module):
                _name(names, _gradient_of(parameter), "gradients", name)
                _name(names, parameter, "parameters", name)
        for parameter in self._parameters():
            _name(names, _gradient_of(parameter), "gradients", "")
            _name(names, parameter, "parameters", "")
        return names

    @fence.fenced("the memory of communication")
    def _communication_bytes(self) -> int | None:
        """Return the bytes of DDP's buckets, of FSDP's largest unsharded parts, and of declared buffers of reductions.

        None where none of these is in use.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return 0
        buckets = [_bucket_bytes(wrapper) for wrapper in self._forward.wrappers]
        gathered = [size for root in self._forward.roots.models if (size := _gathered_bytes(root)) is not None]
        if not buckets and not gathered and not reduction_buffers.are_known():
            return None
        return sum(buckets) + sum(gathered) + self._reduction_bytes()

    def _reduction_bytes(self) -> int:
        parameters = list(self._parameters()) if reduction_buffers.are_known() else []
        return _storage_bytes(reduction_buffers.held_now(), _device_of(parameters[0])) if parameters else 0

    def _gradient_bytes(self) -> int:
        parameters = list(self._parameters())
        device = _device_of(parameters[0]) if parameters else ""
        return _storage_bytes(map(_gradient_of, (*parameters, *self._copies())), device)

    def _copies(self) -> Iterator[Any]:
        """Yield the tensors that optimizers step in place of parameters, such as fp32 copies: ZeRO's state."""
        for optimizer in self._forward.roots.steps_copies:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _models(self) -> list[Any]:
        return [*self._forward.wrappers, *self._forward.roots.models]

    def _parameters(self) -> Iterator[Any]:
        """Yield the parameters that optimizers step, then all parameters and buffers of the models, frozen ones too."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if optimizer not in self._forward.roots.steps_copies else ():
                yield from group["params"]
        for module in self._models():
            shards = _shards(module)
            yield from (shards.get(id(tensor), tensor) for _, tensor in _named_tensors(module))


def _device_of(tensor: Any) -> str:
    import torch

    with torch._C.DisableTorchFunction():
        return str(tensor.device.type)


def _name(names: dict[int, tuple[str, str]], tensor: Any, category: str, name: str) -> None:
    """Name the storage of a tensor, unless it has a name."""
    import torch

    if tensor is not None:
        with torch._C.DisableTorchFunction():
            for part in _parts(tensor):
                if part.layout is torch.strided and (storage := part.untyped_storage()).device.type != FAKE:
                    names.setdefault(storage.data_ptr(), (category, name))


def _tensors_in(state: Any) -> Iterator[Any]:
    """Yield the tensors in the optimizer state of one parameter, nested or not."""
    import torch

    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors_in(value)


def _named_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors of the parameters and buffers of a module.

    Megatron's DDP has an attribute `buffers` in place of the method.
    """
    import torch.nn

    yield from torch.nn.Module.named_parameters(module)
    yield from torch.nn.Module.named_buffers(module)


def _shards(module: Any) -> dict[int, Any]:
    """Return the shards of parameters that FSDP2 has unsharded, by the id of the unsharded ones.

    They are unsharded where a step ends within the backward pass, in which a program runs its optimizers.
    """
    parts = [part for group in _groups(module) or () for part in group.fsdp_params]
    return {id(part._unsharded_param): part.sharded_param for part in parts if hasattr(part, "_unsharded_param")}


def _gradient_of(parameter: Any) -> Any:
    """Return the gradient of a parameter; Megatron accumulates it in `main_grad`."""
    # Views that Megatron's optimizer steps are no leaves: torch warns where their gradient is asked for.
    gradient = parameter.grad if parameter.is_leaf or parameter.retains_grad else None
    return gradient if gradient is not None else getattr(parameter, "main_grad", None)


def _storage_bytes(tensors: Iterable[Any], device: str) -> int:
    """Return the bytes of the storages of some tensors on one kind of device, each once."""
    return sum(_storages(tensors, device).values())


def _storages(tensors: Iterable[Any], device: str) -> dict[int, int]:
    """Return the bytes of the storages of some tensors on one kind of device, by address.

    Of a sharded tensor only the shard of this rank counts.
    """
    import torch

    sizes: dict[int, int] = {}
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            for part in _parts(tensor) if tensor is not None else ():
                if part.layout is torch.strided and (storage := part.untyped_storage()).device.type == device:
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _parts(tensor: Any) -> Iterator[Any]:
    """Yield the tensors that hold the values of a tensor: of a sharded one the shard of this rank.

    A tensor of torchao, such as quantised state of an optimizer, has no storage, but tensors with codes and scales; a
    ShardedTensor, such as a table of torchrec, a list of shards.
    """
    shard = getattr(tensor, "_local_tensor", None)
    if shard is None:  # ZeRO-3 of DeepSpeed keeps the shard of a parameter beside it
        shard = getattr(tensor, "ds_tensor", None)
    if shard is not None:
        yield from _parts(shard)
    elif (shards := getattr(tensor, "_local_shards", None)) is not None:
        for shard in shards:
            yield from _parts(getattr(shard, "tensor", shard))
    elif hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _gathered_bytes(root: Any) -> int | None:
    """Return the bytes of the largest part of a model that FSDP unshards at a time; None for a model without FSDP."""
    import torch.nn

    if (groups := _groups(root)) is not None:
        sizes = [
            sum(part._orig_size.numel() * (part.param_dtype or part.orig_dtype).itemsize for part in group.fsdp_params)
            for group in groups
        ]
        return max(sizes, default=0)
    # In the dictionary: a module of the user may compute attributes in __getattr__.
    modules = torch.nn.Module.modules(root)
    handles = [handle for module in modules if (handle := vars(module).get("_handle")) is not None]
    flat = [handle.flat_param for handle in handles if hasattr(handle, "flat_param")]
    return max((part._unpadded_unsharded_size.numel() * part.dtype.itemsize for part in flat), default=None)


def _groups(root: Any) -> list[Any] | None:
    """Return the groups of parameters of a model that FSDP2 unshards together; None of one without FSDP2.

    Older versions of torch have one a module.
    """
    import torch.nn

    modules = torch.nn.Module.modules(root)  # a module of Lightning around the model is none of FSDP's
    getters = [(module, getattr(type(module), "_get_fsdp_state", None)) for module in modules]
    states = [get_state(module) for module, get_state in getters if get_state is not None]
    found = [
        list(state._fsdp_param_groups) if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for state in states
    ]
    return [group for groups in found for group in groups if group is not None] if states else None


def _bucket_bytes(ddp: Any) -> int:
    """Return the bytes of DDP's buckets; 0 where gradients are views of them and already count."""
    if ddp.gradient_as_bucket_view:
        return 0
    data = ddp._get_ddp_logging_data()
    text = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in text.split(",") if size.strip().isdigit())
