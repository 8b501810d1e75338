"""Label framework functions that their name describes fully: ZeRO, checkpoints, averaging, uneven inputs, rings."""

import functools
from typing import Any, NamedTuple

from dtprof.capture.frameworks.attribution import Attribution
from dtprof.records.sites import Label


class LabelledCall(NamedTuple):
    """A function whose operations all serve the same purpose."""

    module: str
    owner: str | None  # a class of the module
    name: str
    api: str
    what: str


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_STATE_DICT = "torch.distributed._state_dict_utils"
_FSDP = "torch.distributed.fsdp"
_JOIN = "torch.distributed.algorithms.join"
_AVERAGING = "torch.distributed.algorithms.model_averaging"
_BATCH_NORM = "torch.nn.modules._functions"
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
CALLS = (
    LabelledCall(_ZERO, "ZeroRedundancyOptimizer", "_broadcast_params_from_rank", "zero", "broadcast of parameters"),
    LabelledCall(_ZERO, "ZeroRedundancyOptimizer", "consolidate_state_dict", "zero", "consolidation of the state dict"),
    LabelledCall(_STATE_DICT, None, "_iterate_state_dict", "dcp", "gathering of the state dict"),
    LabelledCall(_STATE_DICT, None, "_broadcast_state_dict", "dcp", "broadcast of the state dict"),
    LabelledCall(_STATE_DICT, None, "_distribute_state_dict", "dcp", "distribution of the state dict"),
    LabelledCall(
        f"{_FSDP}._state_dict_utils", None, "_sharded_pre_load_state_dict_hook", "fsdp", "gathering of the state dict"
    ),
    LabelledCall(f"{_FSDP}._optim_utils", None, "_optim_state_dict", "fsdp", "gathering of the state dict"),
    LabelledCall("torch.distributed.checkpoint.utils", None, "_all_gather_keys", "dcp", "exchange of keys"),
    LabelledCall(f"{_AVERAGING}.averagers", "PeriodicModelAverager", "average_parameters", "local_sgd", "averaging"),
    LabelledCall(
        f"{_AVERAGING}.hierarchical_model_averager",
        "HierarchicalModelAverager",
        "average_parameters",
        "local_sgd",
        "averaging",
    ),
    LabelledCall(_JOIN, "Join", "__exit__", "join", "shadowing of collectives"),
    LabelledCall(_JOIN, "Join", "_get_num_nonjoined_procs", "join", "count of ranks with inputs"),
    LabelledCall(_JOIN, "Join", "notify_join_context", "join", "count of ranks with inputs"),
    LabelledCall(_RING, None, "_templated_ring_attention", "cp", "ring attention"),
    LabelledCall(_RING, None, "_templated_ring_attention_backward", "cp", "ring attention, backward"),
    LabelledCall(_RING, None, "context_parallel_unshard", "cp", "gathering of shards"),
    LabelledCall(_BATCH_NORM, "SyncBatchNorm", "forward", "sync_bn", "statistics of the batch"),
    LabelledCall(_BATCH_NORM, "SyncBatchNorm", "backward", "sync_bn", "gradients of the statistics"),
)
_WORDS = {"local_sgd": "local SGD", "sync_bn": "SyncBatchNorm"}
_CHECKPOINT = "torch.distributed.checkpoint.utils"
_PHASES_OF_CHECKPOINT = ("reduce_scatter", "all_reduce", "all_gather", "broadcast")
"""Methods by which checkpoints use a group; their first argument names the step of the checkpoint."""


def _doing(api: str, what: str) -> Label:
    return Label(api, f"{_WORDS.get(api, api)} {what}")


def install(attribution: Attribution) -> None:
    """Hook the functions of the table once the job imports their modules."""
    for call in CALLS:
        attribution.after_import(call.module, functools.partial(_hook, attribution, call))
    attribution.after_import(_CHECKPOINT, functools.partial(_hook_checkpoint, attribution))


def _hook(attribution: Attribution, call: LabelledCall, module: Any) -> None:
    begin = attribution.begin if call.api != "dcp" else attribution.begin_unless_labelled
    owner = module if call.owner is None else getattr(module, call.owner)
    attribution.around(owner, call.name, lambda *_, **__: begin(_doing, call.api, call.what))


def _hook_checkpoint(attribution: Attribution, module: Any) -> None:
    def begin(_: Any, step: str, *__: Any, **___: Any) -> int:
        return attribution.begin(_doing, "dcp", step)

    for name in _PHASES_OF_CHECKPOINT:
        attribution.around(module._DistWrapper, name, begin)
    attribution.around(module._DistWrapper, "barrier", lambda *_, **__: attribution.begin(_doing, "dcp", "barrier"))
