"""Calls that take the Python hook's shorter way, and calls that must not: shortcut.py FOLDER."""

import sys

import torch
import torch.distributed as dist
from recording import open_recorder
from torch.utils._python_dispatch import TorchDispatchMode

KEY = torch._C.DispatchKey.BackendSelect


class Refusing(TorchDispatchMode):
    """Keeps collectives from happening."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            raise NotImplementedError(str(function))
        return function(*args, **(kwargs or {}))


def refused(call):
    """Run a call that must raise; the dispatcher must be as before."""
    try:
        call()
    except (RuntimeError, NotImplementedError):
        assert not torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)
        return
    raise AssertionError("nothing was raised")


def main(folder):
    recorder = open_recorder(folder)
    recorder.install(["allreduce_", "broadcast_", "send", "recv_", "allgather_", "reduce_scatter_", "gather_"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ones = torch.ones(3)

    dist.all_reduce(ones)
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)
    dist.all_reduce(ones, op=dist.ReduceOp.MAX, async_op=True).wait()
    nobody = torch._C._distributed_c10d.BroadcastOptions()
    nobody.rootRank = 5
    refused(lambda: dist.group.WORLD.broadcast([ones], nobody))
    with Refusing():
        refused(lambda: dist.all_reduce(ones))
    leaf = torch.nn.Parameter(torch.ones(5))
    with torch.no_grad():
        dist.broadcast(leaf, src=0)
    with torch.inference_mode():
        dist.all_reduce(torch.ones(7))
    dist.all_reduce(torch.eye(4).to_sparse())
    group = dist.group.WORLD
    group.allreduce(ones).wait()
    group.allreduce([ones, ones.clone()][:1]).wait()
    # Gloo makes new tensors for these: on this thread, and on its own.
    dist.all_gather([torch.zeros(3)], ones)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.CPU)
    dist.reduce_scatter(ones, [torch.ones(3)], op=dist.ReduceOp.AVG)
    dist.gather(ones, [torch.zeros(3)])
    refused(lambda: dist.all_gather([torch.zeros(2)], ones))
    recorder.close_log()
    del group  # one that outlives destroy_process_group ends threads of gloo at the exit of the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
