"""How a process becomes a rank: its device, its part of the cores, and the process group of the job."""

import gc
import os
from typing import Any

import torch
from torch import distributed

from reference_trainer.errors import UsageError
from reference_trainer.options import Options
from reference_trainer.placement import Placement
from reference_trainer.rendezvous import open_fresh_store


def choose_device(options: Options, placement: Placement) -> torch.device:
    """Take the CUDA device of this local rank where there is one for each of them, else the CPU.

    With --share-devices ranks take turns with the devices that there are. NCCL refuses two ranks of one host on one
    device: each gets a host of its own to show, and they send over sockets.
    """
    num_devices = torch.cuda.device_count()
    shares = options.share_devices and num_devices > 0
    if num_devices >= placement.local_world_size or shares:
        if shares:
            os.environ.setdefault("NCCL_HOSTID", f"rank-{placement.rank}")
        device = torch.device("cuda", placement.local_rank % num_devices)
        torch.cuda.set_device(device)
        return device
    if options.share_devices:
        raise UsageError("--share-devices: there is no CUDA device to share; leave it out")
    if options.preset.needs_cuda:
        raise UsageError(
            f"--preset {options.preset_name} needs one CUDA device a rank, but there are {num_devices} for "
            f"{placement.local_world_size} rank(s) here; start fewer ranks, give --share-devices, or --preset small"
        )
    return torch.device("cpu")


def share_cores(placement: Placement) -> None:
    """Give each rank of this machine its part of the cores, unless the user or torchrun already has."""
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // placement.local_world_size))


def join_job(device: torch.device, placement: Placement) -> None:
    """Meet the other ranks, unless there is no job to join."""
    if not placement.launched or distributed.is_initialized():
        return
    place: dict[str, Any] = {}
    if placement.attempt > 0:
        store = open_fresh_store(placement)
        place = {"store": store, "rank": placement.rank, "world_size": placement.world_size}
    if device.type == "cuda":
        distributed.init_process_group("nccl", device_id=device, **place)
    else:
        distributed.init_process_group("gloo", **place)


def leave_job() -> None:
    """Take leave of the other ranks, where all of them do, and end the threads of their groups.

    After an exception on one rank this is left out: on NCCL it may wait for ranks that are gone or stuck.

    What holds groups goes first; models, meshes and stages are cycles of objects. A thread of gloo that lets go of a
    tensor asks for the GIL: while the interpreter shuts down, Python ends such a thread, and the process aborts with
    "terminate called without an active exception" (torch 2.13).
    """
    if distributed.is_initialized():
        gc.collect()
        distributed.destroy_process_group()
