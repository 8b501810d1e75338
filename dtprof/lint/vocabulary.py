"""The names of collectives, groups and ranks in source text."""

import re
from dataclasses import dataclass

POSITION = {
    "all_reduce": 2,
    "broadcast": 2,
    "reduce": 3,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "_all_gather_base": 2,
    "all_gather_coalesced": 2,
    "all_reduce_coalesced": 2,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "_reduce_scatter_base": 3,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "gather": 3,
    "scatter": 3,
    "barrier": 0,
    "monitored_barrier": 0,
    "all_gather_object": 2,
    "gather_object": 3,
    "scatter_object_list": 3,
    "broadcast_object_list": 2,
}
"""Collectives of torch.distributed, and the position of the group among their arguments."""
FUNCTIONAL_POSITION = {
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather_tensor": 2,
    "all_gather_tensor_autograd": 2,
    "reduce_scatter_tensor": 3,
    "reduce_scatter_tensor_autograd": 3,
    "all_to_all_single": 3,
    "all_to_all_single_autograd": 3,
    "all_reduce_coalesced": 2,
    "all_gather_into_tensor_coalesced": 1,
    "reduce_scatter_tensor_coalesced": 3,
}
GROUP_WORDS = ("group", "pg", "process_group")
CREATIONS = frozenset(
    {
        *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"),
        *("init_process_group", "init_device_mesh", "initialize_mesh_device"),
    }
)
"""Calls that every rank must make, also those that are not in the group."""
ONCE = frozenset({"init_process_group"})
CHECKPOINTS = frozenset(
    {"save", "load", "async_save", "save_state_dict", "load_state_dict", "_async_save", "_save_state_dict"}
)
STATES = frozenset(
    {
        *("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"),
        *("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict"),
    }
)
FSDP_STATES = frozenset({"optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict", "summon_full_params"})
BACKWARD = "backward"
OF_REPLICAS = frozenset({BACKWARD, "ddp forward"})
METHODS = {
    "wait_for_everyone": "barrier",
    "full_tensor": "all_gather",
    "monitored_barrier": "barrier",
    "barrier": "barrier",
}
"""Methods with an unambiguous name, of any object."""
ACCELERATOR_METHODS = {
    "gather": "all_gather",
    "gather_for_metrics": "all_gather",
    "reduce": "all_reduce",
    "pad_across_processes": "all_gather",
    "save_state": "checkpoint",
    "load_state": "checkpoint",
    BACKWARD: BACKWARD,
}
ACCELERATORS = frozenset({"accelerator", "fabric"})
GROUP_METHODS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "_reduce_scatter_base": "reduce_scatter",
}
"""Methods of process groups."""
WRAPPERS = {
    "DistributedDataParallel": "ddp",
    "DDP": "ddp",
    "FullyShardedDataParallel": "fsdp",
    "FSDP": "fsdp",
    "fully_shard": "fsdp",
    "replicate": "ddp",
}
WRAPPER_HOMES = ("torch.nn.parallel", "torch.distributed", "fairscale", "torch.nn")

RANK_NAMES = {
    **dict.fromkeys(("rank", "global_rank", "world_rank", "my_rank", "process_index", "proc_rank"), "global"),
    **dict.fromkeys(("local_rank", "node_local_rank", "local_process_index", "node_rank", "group_rank"), "local"),
}
"""Names of a rank, unless the source assigns something else to them, and the scope in which it counts."""
MAIN_NAMES = {
    **dict.fromkeys(
        (
            *("is_main_process", "is_global_zero", "is_rank_zero", "is_rank_0", "is_rank0", "is_master_process"),
            *("is_master", "master_process", "is_main", "is_world_process_zero", "is_chief", "is_primary"),
            *("is_global_primary", "is_first_process", "is_last_process", "on_main_process", "is_main_rank"),
        ),
        "global",
    ),
    **dict.fromkeys(("is_local_main_process", "is_local_zero", "is_local_master", "is_local_process_zero"), "local"),
}
"""Names that are true on one rank."""
RANK_VARIABLES = {
    **dict.fromkeys(("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), "global"),
    **dict.fromkeys(
        ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_NODEID"),
        "local",
    ),
}
RANK_FUNCTIONS = {
    **dict.fromkeys(("get_rank", "get_global_rank", "get_process_index", "get_world_rank"), "global"),
    **dict.fromkeys(("get_local_rank", "get_node_local_rank"), "local"),
}
SIZE_NAMES = frozenset({"world_size", "num_processes", "num_ranks", "nranks"})
ONE_RANK_DECORATORS = frozenset({"rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only"})
LOADER = re.compile(r"(^|_)(data_?)?(loaders?|dataloaders?|batches)$|(^|_)dl$")
GROUP_RECEIVER = re.compile(r"(^|_)(pg|group|process_group|comm)$")
DETERMINISTIC = frozenset(
    {
        *("ImportError", "ModuleNotFoundError", "AttributeError", "NotImplementedError", "NameError"),
        *("TypeError", "StopIteration", "DeprecationWarning", "ImportWarning"),
    }
)
"""Exceptions that depend on the software alone, which all ranks share, or that end a loop in order."""
DISTRIBUTED = "torch.distributed"
FUNCTIONAL = ("torch.distributed._functional_collectives", "torch.distributed.nn.functional", "torch.distributed.nn")
CHECKPOINT_HOMES = ("torch.distributed.checkpoint",)


@dataclass(frozen=True)
class Called:
    """The collective that a function issues, and the position of its group argument."""

    op: str
    group_at: int | None  # among the positional arguments; None: no such argument
    by_all: bool = False  # every rank of the job takes part, whatever the group


def collective_of(name: str) -> Called | None:
    """Return the collective that a function with this dotted name issues; None for none."""
    home, _, last = name.rpartition(".")
    if last in CREATIONS and (home.startswith(DISTRIBUTED) or home.endswith("comm")):
        return Called(last, None, by_all=True)
    if home.startswith(FUNCTIONAL) and last in FUNCTIONAL_POSITION:
        return Called(_plain(last), FUNCTIONAL_POSITION[last])
    if last in POSITION and _is_distributed(home):
        return Called(_plain(last), POSITION[last])
    if home.startswith(CHECKPOINT_HOMES) and (last in CHECKPOINTS or last in STATES):
        return Called("checkpoint", None)
    if last in FSDP_STATES and ("fsdp" in home or home.endswith(("FSDP", "FullyShardedDataParallel"))):
        return Called("state_dict", None)
    return None


def _is_distributed(home: str) -> bool:
    if home in (DISTRIBUTED, *FUNCTIONAL, f"{DISTRIBUTED}.distributed_c10d", f"{DISTRIBUTED}._distributed_c10d"):
        return True
    # deepspeed.comm and the like offer the same functions.
    return home in ("dist", "c10d", "deepspeed.comm", "deepspeed.comm.comm", "comm.comm")


def _plain(name: str) -> str:
    for plain in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "scatter"):
        if plain in name:
            return plain
    return "barrier" if "barrier" in name else name
