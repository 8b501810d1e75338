"""Label the operations of DTensor: redistributions, with the module of a parallel style, and the parallel loss."""

import threading
import weakref
from typing import Any

from dtprof.capture.frameworks.attribution import NOTHING, Attribution
from dtprof.capture.frameworks.device_meshes import dimension_groups
from dtprof.records.sites import Label

_BY = "torch.distributed.tensor.parallel"
_AXES = ("tp", "cp", "sp", "ep")
_INPUT, _OUTPUT = "input", "output"
_STYLES = {  # functions of parallel styles, and what they redistribute
    "ColwiseParallel": {"_prepare_input_fn": _INPUT, "_prepare_output_fn": _OUTPUT},
    "RowwiseParallel": {"_prepare_input_fn": _INPUT, "_prepare_output_fn": _OUTPUT},
    "SequenceParallel": {"_prepare_input_fn": _INPUT, "_prepare_output_fn": _OUTPUT},
    "PrepareModuleInput": {"_prepare_input_fn": _INPUT, "_prepare_input_kwarg_fn": _INPUT},
    "PrepareModuleOutput": {"_prepare_out_fn": _OUTPUT},
}


def _of_module(what: str, module: str) -> Label:
    return Label("tp", f"tp {what} of {module}" if module else f"tp {what}", module=module)


def _between(api: str, placements: str) -> Label:
    return Label(api, f"{api} redistribution {placements}")


def _doing(api: str, what: str) -> Label:
    return Label(api, f"{api} {what}")


class TensorParallel:
    """Hooks into DTensor and the parallel styles."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Names of modules within the module that the user parallelizes."""
        self._meshes: set[int] = set()
        """Hashes of the meshes of tensor parallelism: a reference to a mesh would keep its groups alive."""
        self._sharded_over: set[str] = set()
        """Groups over which the program itself shards parameters, of which nothing says what they are for."""
        self._within = threading.local()
        """`of`: input or output, and module, for which this thread redistributes."""
        self._described: dict[tuple[Any, ...], tuple[str, str]] = {}

    def install(self) -> None:
        """Wait for the job to import DTensor."""
        after_import = self._attribution.after_import
        after_import("torch.distributed.tensor._redistribute", self._hook_redistribution)
        after_import("torch.distributed.tensor._api", self._hook_distribution)
        after_import("torch.distributed.tensor.parallel.api", self._hook_parallelize)
        after_import("torch.distributed.tensor.parallel.style", self._hook_styles)
        after_import("torch.distributed.tensor.parallel.loss", self._hook_loss)

    def _hook_redistribution(self, module: Any) -> None:
        around = self._attribution.around
        around(module, "redistribute_local_tensor", self._begin_redistribution)
        around(module.Redistribute, "forward", self._keep_for_backward, lambda *_: None)
        around(module.Redistribute, "backward", self._begin_backward, self._end_of)

    def _hook_distribution(self, module: Any) -> None:
        if not self._attribution.has_all(module, ("distribute_tensor",)):
            return
        begin = self._attribution.begin_unless_labelled
        self._attribution.around(module, "distribute_tensor", lambda *_, **__: begin(_doing, "dtensor", "distribution"))
        self._attribution.after(module, "distribute_tensor", self._note_sharded_groups)

    def _hook_parallelize(self, module: Any) -> None:
        self._attribution.around(module, "parallelize_module", self._begin_parallelize)

    def _hook_styles(self, module: Any) -> None:
        for style, functions in _STYLES.items():
            for name, what in functions.items() if hasattr(module, style) else ():
                self._attribution.around(getattr(module, style), name, self._begins(what), self._end_of)

    def _hook_loss(self, module: Any) -> None:
        for op, handler in module.customized_loss_ops.items():
            module.customized_loss_ops[op] = self._attribution.wrapped(
                handler, "loss_parallel", lambda *_, **__: self._attribution.begin(_doing, "tp", "loss")
            )

    def _begin_parallelize(self, module: Any, device_mesh: Any = None, *_: Any, **__: Any) -> int:
        for name, part in module.named_modules():
            self._names.setdefault(part, name)
        for group in (dimension_groups(device_mesh) or [])[:1]:
            self._meshes.add(hash(device_mesh))
            self._attribution.declare_use(group, "tp", _BY)
        return self._attribution.begin_unless_labelled(_doing, "tp", "distribution of parameters")

    def _begins(self, what: str) -> Any:
        def begin(*arguments: Any, **_: Any) -> Any:
            module = next((self._names[x] for x in arguments if _is_module(x) and x in self._names), "")
            return self._enter((what, module))

        return begin

    def _enter(self, of: tuple[str, str] | None) -> tuple[str, str] | None:
        before: tuple[str, str] | None = getattr(self._within, "of", None)
        self._within.of = of
        return before

    def _end_of(self, before: tuple[str, str] | None, failed: bool) -> None:
        del failed
        self._within.of = before

    def _keep_for_backward(self, ctx: Any, tensor: Any, _: Any, placements: Any, *__: Any, **___: Any) -> None:
        of = getattr(self._within, "of", None)
        if of is not None:
            ctx._dtprof_of = of
        if self._sharded_over:
            self._find_sums(ctx, tensor, placements)

    def _begin_backward(self, ctx: Any, *_: Any, **__: Any) -> Any:
        of = getattr(ctx, "_dtprof_of", None)
        return self._enter(None if of is None else (f"gradient of the {of[0]}", of[1]))

    def _note_sharded_groups(self, distributed: Any, tensor: Any, *_: Any, **__: Any) -> None:
        import torch

        if isinstance(tensor, torch.nn.Parameter):
            groups = dimension_groups(distributed.device_mesh) or ()
            placed = zip(groups, distributed.placements, strict=False)
            self._sharded_over.update(group for group, placement in placed if placement.is_shard())

    def _find_sums(self, ctx: Any, tensor: Any, placements: Any) -> None:
        """Declare a group tensor-parallel whose ranks hold shards of parameters and partial sums of one activation.

        Sharded data-parallel ranks gather parameters instead; what they sum are gradients, which need no gradient, and
        the loss, which has no dimensions.
        """
        spec = tensor._spec
        if not ctx.needs_input_grad[0] or tensor.ndim < 2:
            return
        for group, old, new in zip(dimension_groups(spec.mesh) or (), spec.placements, placements, strict=False):
            if group in self._sharded_over and old.is_partial() and not new.is_partial():
                self._attribution.declare_use(group, "tp", _BY)
                self._sharded_over.discard(group)

    def _begin_redistribution(self, _: Any, current_spec: Any, target_spec: Any, *__: Any, **___: Any) -> int:
        if self._attribution.labels() is None:
            return NOTHING
        of = getattr(self._within, "of", None)
        if of is not None:
            return self._attribution.begin(_of_module, *of)
        key = (hash(current_spec.mesh), current_spec.placements, target_spec.placements)
        described = self._described.get(key)
        if described is None:
            described = self._describe(current_spec, target_spec)
            if len(self._described) < 10_000:
                self._described[key] = described
        return self._attribution.begin_unless_labelled(_between, *described)

    def _describe(self, current_spec: Any, target_spec: Any) -> tuple[str, str]:
        """Return the framework of a redistribution, by the mesh dimensions that change, and its text."""
        mesh = current_spec.mesh
        names = mesh.mesh_dim_names or ("tp" if hash(mesh) in self._meshes else "",) * mesh.ndim
        changes = [
            (name, f"{old} to {new}")
            for name, old, new in zip(names, current_spec.placements, target_spec.placements, strict=True)
            if old != new
        ]
        apis = {name if name in _AXES else "dtensor" for name, _ in changes}
        return apis.pop() if len(apis) == 1 else "dtensor", ", ".join(text for _, text in changes)


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)
