"""How a job becomes one: the device of a rank, the process groups, and the model spread over them."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from reference_trainer.errors import UsageError
from reference_trainer.options import Options
from reference_trainer.placement import Placement


def choose_device(options: Options, placement: Placement) -> torch.device:
    """Take the CUDA device of this local rank where there is one for each of them, else the CPU."""
    num_devices = torch.cuda.device_count()
    if num_devices >= placement.local_world_size:
        device = torch.device("cuda", placement.local_rank)
        torch.cuda.set_device(device)
        return device
    if options.preset.needs_cuda:
        raise UsageError(
            f"--preset gpu needs one CUDA device a rank, but there are {num_devices} for {placement.local_world_size} "
            "rank(s) here; start fewer ranks, or give --preset small"
        )
    return torch.device("cpu")


def share_cores(placement: Placement) -> None:
    """Give each rank of this machine its part of the cores, unless the user or torchrun already has."""
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // placement.local_world_size))


def start_process_groups(device: torch.device, placement: Placement) -> distributed.ProcessGroup | None:
    """Join the job and return the group that averages the loss, or None where there is no job to join.

    The loss has a group of its own so that it cannot be mixed up with gradients: in one group, a rank that leaves out
    the all_reduce of the loss would send its next gradient bucket where the others expect the loss, and gloo would
    fail with two sizes that do not match, or mix the values, rather than wait.
    """
    if not placement.launched:
        return None
    if device.type == "cuda":
        distributed.init_process_group("nccl", device_id=device)
    else:
        distributed.init_process_group("gloo")
    return cast(distributed.ProcessGroup, distributed.new_group(group_desc="loss"))


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a model so that every backward pass averages its gradients over all ranks."""
    if not distributed.is_initialized():
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def synchronise_gradients(model: nn.Module, *, enabled: bool) -> AbstractContextManager[None]:
    """Hold back the averaging of gradients in all but the last micro-batch of a step."""
    if enabled or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def leave_process_groups() -> None:
    """Take leave of the other ranks, where all of them do.

    After an exception on one rank this is left out: on NCCL it may wait for ranks that are gone or stuck.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
