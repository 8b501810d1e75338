"""Scenarios: threads, groups of several back ends, tools and modes around the calls, fake communication."""

import multiprocessing
import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric_memory
from torch._subclasses import FakeTensorMode
from torch.distributed import rpc
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the back end "fake"
from torch.utils.data import DataLoader, Dataset

from tests.completeness.programs.models import WIDTH, Scenarios, batch, layers, mesh, train, world_mesh

SCENARIOS = Scenarios("Threads, groups, tools and modes")
ORACLE = None  # the oracle of the process, where a scenario must tell it something


class Noise(Dataset):
    """Eight random samples."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randn(WIDTH)


@SCENARIOS.add("three threads on three groups", ranks=(2, 4))
def threads():
    groups = [dist.new_group() for _ in range(3)]

    def issue(group):
        for _ in range(50):
            dist.all_reduce(torch.ones(8), group=group)

    running = [threading.Thread(target=issue, args=(group,)) for group in groups]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


@SCENARIOS.add("backward pass in another thread")
def backward_in_a_thread():
    ddp = DistributedDataParallel(layers())
    loss = ddp(batch()).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@SCENARIOS.add("new groups, used and destroyed", ranks=(2, 4))
def short_lived_groups():
    for _ in range(5):
        group = dist.new_group()
        dist.all_reduce(torch.ones(4), group=group)
        ORACLE.retire(group)


@SCENARIOS.add("group of two back ends, cpu:gloo,cuda:gloo")
def several_back_ends():
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=group)
    dist.barrier(group)
    ORACLE.expect(group, 4)


@SCENARIOS.add("overlapping subgroups", ranks=(4,))
def overlapping_subgroups():
    rank = dist.get_rank()
    for members in ([0, 1, 2], [1, 2, 3], [0, 3]):
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(torch.ones(4), group=group)
            dist.broadcast(torch.ones(4), members[-1], group=group)


@SCENARIOS.add("mesh of two dimensions, sliced and flattened", ranks=(4,))
def sliced_mesh():
    both = mesh(2, 2, "dp", "tp")
    for group in (both.get_group("dp"), both.get_group("tp"), both["dp", "tp"]._flatten("all").get_group()):
        dist.all_reduce(torch.ones(4), group=group)


@SCENARIOS.add("operations that gloo builds from others", ranks=(2, 4))
def built_from_others():
    size = dist.get_world_size()
    dist.reduce_scatter(torch.ones(4), [torch.ones(4) for _ in range(size)])
    dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * size))
    dist.monitored_barrier()


@SCENARIOS.add("torch.profiler on")
def profiled():
    with torch.profiler.profile(with_stack=True, record_shapes=True):
        train(DistributedDataParallel(layers()))


@SCENARIOS.add("CommDebugMode on")
def counted():
    sharded = distribute_tensor(torch.ones(8), world_mesh("tp"), [Shard(0)])
    with CommDebugMode() as mode:
        sharded.full_tensor()
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
    assert mode.get_total_counts() == 2


@SCENARIOS.add("anomaly detection on")
def anomalies_detected():
    with torch.autograd.detect_anomaly(check_nan=False):
        train(DistributedDataParallel(layers()))


@SCENARIOS.add("forked data loader workers")
def forked_workers():
    ddp = DistributedDataParallel(layers())
    for samples in DataLoader(Noise(), 2, num_workers=2, multiprocessing_context="fork"):
        ddp(samples).sum().backward()


@SCENARIOS.add("forked child that does not communicate")
def forked_child():
    child = multiprocessing.get_context("fork").Process(target=abs, args=(1,))
    dist.all_reduce(torch.ones(4))
    child.start()
    child.join()
    assert child.exitcode == 0
    dist.all_reduce(torch.ones(4))


@SCENARIOS.add("gradient through functional collectives under torch.func", refused="setup_context")
def func_gradient():
    torch.func.grad(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD).sum())(torch.ones(3))


@SCENARIOS.add("custom autograd function that communicates")
def custom_function():
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(_context, x):
            total = x.clone()
            dist.all_reduce(total)
            return total

        @staticmethod
        def backward(_context, gradient):
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    Reduce.apply(torch.ones(4, requires_grad=True)).sum().backward()


@SCENARIOS.add("hook of a parameter that communicates")
def parameter_hook():
    model = layers()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    train(model)


@SCENARIOS.add("fake tensors")
def fake_tensors():
    with FakeTensorMode():
        dist.all_reduce(torch.ones(4))
        functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).sum()


@SCENARIOS.add("fake process group")
def fake_group():
    group = dist.new_group(backend="fake")
    dist.all_reduce(torch.ones(4), group=group)
    dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], torch.ones(4), group=group)
    ORACLE.expect(group, 2)


@SCENARIOS.add("LocalTensorMode")
def local_tensors():
    group = dist.new_group(backend="fake")
    with LocalTensorMode(dist.get_world_size()):
        tensor = LocalTensor({rank: torch.ones(2) * rank for rank in range(dist.get_world_size())})
        dist.all_reduce(tensor, group=group)


@SCENARIOS.add("RPC")
def remote_call():
    rank, store = dist.get_rank(), f"file://{ORACLE.folder}/rpc-store"
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.shutdown()


@SCENARIOS.add("symmetric memory", refused="SymmetricMemory does not support device type cpu")
def symmetric():
    symmetric_memory.rendezvous(symmetric_memory.empty(16, device="cpu"), dist.group.WORLD)


@SCENARIOS.add("group destroyed and initialised again, twice", ranks=(2, 4))
def initialised_again():
    """Comes last: every group of the process is gone afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for attempt in range(2):
        ORACLE.destroy()
        mesh.cache_clear()
        store = f"file://{ORACLE.folder}/store-{attempt}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), group=dist.new_group())
        train(DistributedDataParallel(layers()))
