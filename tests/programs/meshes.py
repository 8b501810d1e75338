"""Make meshes: dimensions with groups of their own, with the default group, joined, taken over; and split a group."""

import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp", "dp"):  # slices: nothing new
        dist.all_reduce(torch.ones(1), group=grid[name].get_group())
    joined = grid["dp", "tp"]._flatten("dp_tp")
    dist.all_reduce(torch.ones(1), group=joined.get_group())
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dist.all_reduce(torch.ones(1), group=line.get_group())

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    DeviceMesh.from_group(pairs[rank // 2], "cpu", mesh_dim_names=("cp",))
    dist.all_reduce(torch.ones(1), group=pairs[rank // 2])

    # Megatron and DeepSpeed keep their groups in variables of modules.
    megatron = types.ModuleType("megatron.core.parallel_state")
    sys.modules[megatron.__name__] = megatron
    described = [dist.new_group([0, 3], group_desc="PIPELINE_MODEL_PARALLEL_GROUP"), dist.new_group([1, 2])]
    megatron._EXPERT_MODEL_PARALLEL_GROUP = described[1]
    megatron._TENSOR_MODEL_PARALLEL_GROUP = None
    dist.all_reduce(torch.ones(1), group=described[0 if rank in (0, 3) else 1])

    deepspeed = types.ModuleType("deepspeed.utils.groups")
    sys.modules[deepspeed.__name__] = deepspeed
    expert, pipe = dist.new_group([0, 2]), dist.new_group([1, 3])
    deepspeed._EXPERT_DATA_PARALLEL_GROUP = {"ep_size_2": expert}
    deepspeed.mpu = types.SimpleNamespace(pp_proc_group=pipe)
    dist.all_reduce(torch.ones(1), group=pipe if rank % 2 else expert)
    # A group that torch.distributed keeps no list of; of one rank, because the split of gloo (2.13) now and then waits
    # for ever while it connects two of them, without dtprof as well.
    if rank % 2:
        odd = dist.group.WORLD.split_group([rank], group_desc="mesh_odd")
        odd.allreduce([torch.ones(1)]).wait()
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
