"""Train on two ranks of gloo with each framework of torch in turn; print as JSON what this torch cannot run."""

import contextlib
import json
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from dtprof import torch_versions

STEPS = 4
refused: dict[str, str] = {}


@contextlib.contextmanager
def framework(name: str) -> Iterator[None]:
    """Note what a framework raises; it raises so on both ranks, before it communicates."""
    try:
        yield
    except (RuntimeError, AttributeError, ImportError, NotImplementedError, TypeError) as error:
        refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]


def train(module: nn.Module, run: Callable[[], object] | None = None) -> None:
    """Take the steps of an optimizer over the module, after its own passes or those of a schedule."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(STEPS):
        if run is not None:
            run()
        else:
            module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def model() -> nn.Sequential:
    """Return two layers."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def main() -> None:
    """Run all of them."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    with framework("ddp"):
        train(nn.parallel.DistributedDataParallel(model()))

    with framework("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        train(fully_shard(model()))

    with framework("tensor_parallel"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        train(parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))

    with framework("pipeline"):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        if torch_versions.is_older_than(torch.__version__, (2, 11)):
            raise NotImplementedError("its schedules hang or abort on gloo, recorded or not")
        part = nn.Linear(8, 8)
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).sum())
        if rank == 0:
            train(part, lambda: schedule.step(torch.ones(4, 8)))
        else:
            train(part, lambda: schedule.step(target=torch.zeros(4, 8)))

    if rank == 0:
        print(json.dumps(refused))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
