"""Label the operations of FSDP by module: of FSDP2 by parameter group, of FSDP1 by flat parameter."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

from dtprof.capture.frameworks.attribution import Attribution
from dtprof.records.sites import Label

_BY = "torch.distributed.fsdp"
_WRAPPER = "_fsdp_wrapped_module"
_ROOT = "the root module"


def _all_gather(module: str) -> Label:
    return Label("fsdp", f"fsdp all-gather of {module or _ROOT}", module=module)


def _reduce_scatter(module: str) -> Label:
    return Label("fsdp", f"fsdp reduce-scatter of {module or _ROOT}", module=module)


def _all_reduce(module: str) -> Label:
    return Label("fsdp", f"fsdp all-reduce of {module or _ROOT}", module=module)


def _other(what: str) -> Label:
    return Label("fsdp", f"fsdp {what}")


def _names_of(param_group: Any) -> list[str]:
    """Return the names of the parameters of a group as its first module has them, in the order in which they lie."""
    within = {id(module): name for name, module in param_group.modules[0].named_modules()}
    infos = (parameter._module_info for parameter in param_group.fsdp_params)
    return [f"{within.get(id(info.module), '?')}.{info.param_name}" for info in infos]


def after_reduce_scatter(attribution: Attribution, call: Callable[..., None]) -> None:
    """Call this whenever FSDP2 has issued a reduce-scatter, by whichever of its classes."""

    def hook(module: Any) -> None:
        for name in ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter"):
            if hasattr(module, name):
                attribution.after(getattr(module, name), "__call__", call)

    attribution.after_import("torch.distributed.fsdp._fully_shard._fsdp_collectives", hook)


class FullySharded:
    """Hooks into both generations of FSDP."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution
        self._reducing = threading.local()
        """`module`: whose gradients this thread reduces, if an all-reduce follows the reduce-scatter (HSDP)."""
        self._modules: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Names of FSDP1's modules, by handle of their flat parameter."""

    def install(self) -> None:
        """Wait for the job to import FSDP."""
        after_import = self._attribution.after_import
        after_import("torch.distributed.fsdp._fully_shard._fsdp_param_group", self._hook_param_groups)
        after_reduce_scatter(self._attribution, self._after_reduce_scatter)
        after_import("torch.distributed.fsdp._flat_param", self._hook_flat_params)
        after_import("torch.distributed.fsdp._runtime_utils", self._hook_runtime)
        after_import("torch.distributed.fsdp._init_utils", self._hook_init)
        after_import("torch.distributed.fsdp.fully_sharded_data_parallel", self._hook_wrapper)

    def _hook_param_groups(self, module: Any) -> None:
        group = module.FSDPParamGroup
        self._attribution.after(group, "__init__", self._declare_mesh)
        self._attribution.around(group, "unshard", self._begin_unshard)
        self._attribution.around(group, "post_backward", self._begin_post_backward, self._end_reduction)

    def _declare_mesh(self, _: None, param_group: Any, *__: Any, **___: Any) -> None:
        mesh = param_group.mesh_info
        shard, replicate = getattr(mesh, "shard_process_group", None), getattr(mesh, "replicate_process_group", None)
        self._declare(shard, replicate)
        group = shard if shard is not None else replicate
        if group is not None:
            self._attribution.declare_parameters(group, _names_of(param_group), "fully_shard")

    def _declare(self, shard: Any, replicate: Any) -> None:
        for group, axis in ((shard, "dp_shard"), (replicate, "dp_replicate")):
            if group is not None:
                both = shard is not None and replicate is not None
                self._attribution.declare_use(group, axis if both else "dp", _BY)

    def _begin_unshard(self, param_group: Any, *_: Any, **__: Any) -> int:
        return self._attribution.begin(_all_gather, param_group._module_fqn or "")

    def _begin_post_backward(self, param_group: Any, *_: Any, **__: Any) -> int:
        module, mesh = param_group._module_fqn or "", param_group.mesh_info
        shards, replicates = hasattr(mesh, "shard_process_group"), hasattr(mesh, "replicate_process_group")
        if not shards:
            return self._attribution.begin(_all_reduce, module)
        self._reducing.module = module if replicates else None
        return self._attribution.begin(_reduce_scatter, module)

    def _after_reduce_scatter(self, *_: Any, **__: Any) -> None:
        module = getattr(self._reducing, "module", None)
        if module is not None:
            self._attribution.begin(_all_reduce, module)

    def _end_reduction(self, before: Any, failed: bool) -> None:
        self._reducing.module = None
        self._attribution.end(before, failed)

    def _hook_flat_params(self, module: Any) -> None:
        flat_param, around = module.FlatParamHandle, self._attribution.around
        around(flat_param, "_all_gather_flat_param", lambda handle, *_, **__: self._begin(_all_gather, handle))
        around(flat_param, "unshard_grad", lambda *_, **__: self._attribution.begin(_other, "all-gather of gradients"))

    def _hook_runtime(self, module: Any) -> None:
        around = self._attribution.around
        self._attribution.after(module, "_share_state_and_init_handle_attrs", self._name_modules)
        around(module, "_reduce_grad", self._begin_reduce_grad, self._end_reduction)
        around(module, "_reduce_grad_no_shard", lambda _, handle, *__, **___: self._begin(_all_reduce, handle))
        # HYBRID_SHARD calls this between its reduce-scatter and its all-reduce.
        self._attribution.after(module, "_no_dispatch_record_stream", self._after_reduce_scatter)

    def _hook_init(self, module: Any) -> None:
        self._attribution.around(
            module,
            "_sync_module_params_and_buffers",
            lambda *_, **__: self._attribution.begin(_other, "broadcast of parameters and buffers"),
        )

    def _hook_wrapper(self, module: Any) -> None:
        wrapper, around = module.FullyShardedDataParallel, self._attribution.around
        around(wrapper, "clip_grad_norm_", lambda *_, **__: self._attribution.begin(_other, "norm of gradients"))

    def _begin(self, describe: Any, handle: Any) -> int:
        return self._attribution.begin(describe, self._modules.get(handle, ""))

    def _begin_reduce_grad(self, state: Any, handle: Any, *_: Any, **__: Any) -> int:
        replicates = getattr(state, "_inter_node_pg", None) is not None
        self._reducing.module = self._modules.get(handle, "") if replicates else None
        return self._begin(_reduce_scatter, handle)

    def _name_modules(self, _: None, root_state: Any, root_module: Any) -> None:
        """Remember the names of modules without FSDP's wrappers, once the root is known."""
        self._declare(root_state.process_group, getattr(root_state, "_inter_node_pg", None))
        for name, module in root_module.named_modules():
            handle = getattr(module, "_handle", None)
            if handle is not None:
                parts = [part for part in name.split(".") if part not in (_WRAPPER, "_checkpoint_wrapped_module")]
                self._modules[handle] = ".".join(parts)
