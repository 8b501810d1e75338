"""Make torch raise and warn in many places; print every traceback, as the program sees it."""

import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError(f"item {index}")


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, __: torch.Tensor) -> torch.Tensor:
        raise ValueError("backward")


class Stepping(torch.optim.SGD):
    def step(self, _: Callable[[], float] | None = None) -> None:
        warnings.warn("step", FutureWarning, stacklevel=2)
        raise ValueError("step")


def unused_parameters() -> None:
    model = nn.parallel.DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    model.module.forward = model.module[0].forward
    for _ in range(2):
        model(torch.ones(2)).sum().backward()


def deep() -> None:
    warnings.warn("deep", UserWarning, stacklevel=3)
    raise KeyError("deep")


class Warns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep()
        return x


def report(name: str, case: Callable[[], object]) -> None:
    """Print the traceback of a case, if it raises."""
    try:
        case()
    except Exception:  # noqa: BLE001 - whatever it is, it is printed
        print(f"{name}:\n{traceback.format_exc()}", flush=True)


def main() -> None:
    report("a group without a rendezvous", lambda: dist.init_process_group("gloo", init_method="nowhere://"))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    ones = torch.ones(2, requires_grad=True)
    profiler = torch.profiler.profile()
    cases: dict[str, Callable[[], object]] = {
        "a second group": lambda: dist.init_process_group("gloo"),
        "an unknown backend": lambda: dist.new_group(backend="none"),
        "an item": lambda: next(iter(DataLoader(Items()))),
        "an item of a worker": lambda: next(iter(DataLoader(Items(), num_workers=1))),
        "a backward pass": lambda: Raising.apply(ones).sum().backward(),
        "a backward pass of tensors": lambda: torch.autograd.backward([Raising.apply(ones).sum()]),
        "gradients": lambda: torch.autograd.grad(Raising.apply(ones).sum(), ones),
        "an optimizer": lambda: Stepping([nn.Parameter(torch.ones(2))], lr=0.1).step(),
        "parameters without gradients": unused_parameters,
        "a model under DDP": lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2))(torch.ones(3)),
        "a model under FSDP": lambda: fully_shard(nn.Linear(2, 2), mesh=mesh)(torch.ones(3)),
        "a model without a wrapper": lambda: nn.Linear(2, 2)(torch.ones(3)),
        "a tensor-parallel model": lambda: parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())(torch.ones(3)),
        "a plan": lambda: parallelize_module(nn.Linear(2, 2), mesh, {"0": None}),
        "a collective of a wrong type": lambda: dist.all_reduce(
            torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX
        ),
        "a collective of wrong sizes": lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
        "a wait": lambda: dist.all_reduce(torch.ones(2).bool(), op=dist.ReduceOp.SUM, async_op=True).wait(),
        "an object": lambda: dist.broadcast_object_list([lambda: 0], src=0),
        "a message to itself": lambda: dist.send(torch.ones(1), dst=0),
        "a checkpoint": lambda: torch.save(lambda: 0, "/nowhere/checkpoint"),
        "a file": lambda: torch.load("/nowhere/checkpoint"),
        "a profiler": lambda: (profiler.start(), profiler.start(), profiler.stop(), profiler.stop()),
        "a checkpointed part": lambda: checkpoint(Warns(), ones, use_reentrant=True),
        "a recomputed part": lambda: checkpoint(Raising.apply, ones, use_reentrant=False).sum().backward(),
        "a module that warns": lambda: Warns()(torch.ones(1)),
    }
    for name, case in cases.items():
        report(name, case)
    dist.destroy_process_group()
    raise SystemError("the last one")


main()
