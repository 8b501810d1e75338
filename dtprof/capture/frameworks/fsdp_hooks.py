"""Label what FSDP does: FSDP2 by parameter group, FSDP1 by flat parameter, both by the module they belong to."""

import threading
import weakref
from typing import Any

from dtprof.capture.attribution_labels import Description
from dtprof.capture.frameworks.attribution import Acting

_BY = "torch.distributed.fsdp"
_WRAPPER = "_fsdp_wrapped_module"
_ROOT = "the root module"


def _all_gather(module: str) -> Description:
    return Description("fsdp", f"fsdp all-gather of {module or _ROOT}", module=module)


def _reduce_scatter(module: str) -> Description:
    return Description("fsdp", f"fsdp reduce-scatter of {module or _ROOT}", module=module)


def _all_reduce(module: str) -> Description:
    return Description("fsdp", f"fsdp all-reduce of {module or _ROOT}", module=module)


def _other(what: str) -> Description:
    return Description("fsdp", f"fsdp {what}")


class FullySharded:
    """Hooks into both generations of FSDP."""

    def __init__(self, acting: Acting) -> None:
        """Keep who tells the recorder."""
        self._acting = acting
        self._reducing = threading.local()
        """`module`: whose gradients this thread reduces, where an all-reduce follows the reduce-scatter."""
        self._modules: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Names of FSDP1's modules, by handle of their flat parameter."""

    def install(self) -> None:
        """Wait for the job to import FSDP."""
        after_import = self._acting.after_import
        after_import("torch.distributed.fsdp._fully_shard._fsdp_param_group", self._hook_param_groups)
        after_import("torch.distributed.fsdp._fully_shard._fsdp_collectives", self._hook_reduce_scatters)
        after_import("torch.distributed.fsdp._flat_param", self._hook_flat_params)
        after_import("torch.distributed.fsdp._runtime_utils", self._hook_runtime)
        after_import("torch.distributed.fsdp._init_utils", self._hook_init)
        after_import("torch.distributed.fsdp.fully_sharded_data_parallel", self._hook_wrapper)

    # ---- FSDP2 ---------------------------------------------------------------------------------------------------

    def _hook_param_groups(self, module: Any) -> None:
        group = module.FSDPParamGroup
        self._acting.after(group, "__init__", self._declare_mesh)
        self._acting.around(group, "unshard", self._begin_unshard)
        self._acting.around(group, "post_backward", self._begin_post_backward, self._end_reduction)

    def _hook_reduce_scatters(self, module: Any) -> None:
        for name in ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter"):
            if hasattr(module, name):
                self._acting.after(getattr(module, name), "__call__", self._after_reduce_scatter)

    def _declare_mesh(self, _: None, param_group: Any, *__: Any, **___: Any) -> None:
        mesh = param_group.mesh_info
        shard, replicate = getattr(mesh, "shard_process_group", None), getattr(mesh, "replicate_process_group", None)
        self._declare(shard, replicate)

    def _declare(self, shard: Any, replicate: Any) -> None:
        for group, axis in ((shard, "dp_shard"), (replicate, "dp_replicate")):
            if group is not None:
                both = shard is not None and replicate is not None
                self._acting.declare_use(group.group_name, axis if both else "dp", _BY)

    def _begin_unshard(self, param_group: Any, *_: Any, **__: Any) -> int:
        return self._acting.begin(_all_gather, param_group._module_fqn or "")

    def _begin_post_backward(self, param_group: Any, *_: Any, **__: Any) -> int:
        module, mesh = param_group._module_fqn or "", param_group.mesh_info
        shards, replicates = hasattr(mesh, "shard_process_group"), hasattr(mesh, "replicate_process_group")
        if not shards:
            return self._acting.begin(_all_reduce, module)
        self._reducing.module = module if replicates else None
        return self._acting.begin(_reduce_scatter, module)

    def _after_reduce_scatter(self, *_: Any, **__: Any) -> None:
        module = getattr(self._reducing, "module", None)
        if module is not None:
            self._acting.begin(_all_reduce, module)

    def _end_reduction(self, before: Any, failed: bool) -> None:
        self._reducing.module = None
        self._acting.end(before, failed)

    # ---- FSDP1 ---------------------------------------------------------------------------------------------------

    def _hook_flat_params(self, module: Any) -> None:
        handle, around = module.FlatParamHandle, self._acting.around
        around(handle, "_all_gather_flat_param", lambda own, *_, **__: self._begin(_all_gather, own))
        around(handle, "unshard_grad", lambda *_, **__: self._acting.begin(_other, "all-gather of gradients"))

    def _hook_runtime(self, module: Any) -> None:
        around = self._acting.around
        self._acting.after(module, "_share_state_and_init_handle_attrs", self._name_modules)
        around(module, "_reduce_grad", self._begin_reduce_grad, self._end_reduction)
        around(module, "_reduce_grad_no_shard", lambda _, own, *__, **___: self._begin(_all_reduce, own))
        # Called between the two of a hybrid sharding strategy.
        self._acting.after(module, "_no_dispatch_record_stream", self._after_reduce_scatter)

    def _hook_init(self, module: Any) -> None:
        self._acting.around(
            module,
            "_sync_module_params_and_buffers",
            lambda *_, **__: self._acting.begin(_other, "broadcast of parameters and buffers"),
        )

    def _hook_wrapper(self, module: Any) -> None:
        wrapper, around = module.FullyShardedDataParallel, self._acting.around
        around(wrapper, "clip_grad_norm_", lambda *_, **__: self._acting.begin(_other, "norm of gradients"))

    def _begin(self, describe: Any, handle: Any) -> int:
        return self._acting.begin(describe, self._modules.get(handle, ""))

    def _begin_reduce_grad(self, state: Any, handle: Any, *_: Any, **__: Any) -> int:
        replicates = getattr(state, "_inter_node_pg", None) is not None
        self._reducing.module = self._modules.get(handle, "") if replicates else None
        return self._begin(_reduce_scatter, handle)

    def _name_modules(self, _: None, root_state: Any, root_module: Any) -> None:
        """Note the names of the modules, as the user knows them, once the root is known."""
        self._declare(root_state.process_group, getattr(root_state, "_inter_node_pg", None))
        for name, module in root_module.named_modules():
            handle = getattr(module, "_handle", None)
            if handle is not None:
                parts = [part for part in name.split(".") if part not in (_WRAPPER, "_checkpoint_wrapped_module")]
                self._modules[handle] = ".".join(parts)
