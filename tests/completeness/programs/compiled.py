"""Scenarios: torch.compile."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.completeness.programs.models import Scenarios, layers, train, world_mesh
from tests.completeness.programs.sharded import fsdp2
from tests.completeness.programs.tensor_parallel import tensor_parallel

SCENARIOS = Scenarios("torch.compile")


def chained(x):
    """Call three functional collectives."""
    world = dist.group.WORLD
    total = functional.all_reduce(2 * x, "sum", world)
    gathered = functional.all_gather_tensor(total + 1, 0, world)
    return 2 * functional.reduce_scatter_tensor(gathered, "sum", 0, world)


def compiled(model_or_function, backend="aot_eager", **options):
    torch.compiler.reset()
    return torch.compile(model_or_function, backend=backend, **options)


def call_thrice(function):
    for _ in range(3):
        function(torch.ones(4))


@SCENARIOS.add("compiled functional collectives, eager")
def compiled_eager():
    call_thrice(compiled(chained, "eager", fullgraph=True))


@SCENARIOS.add("compiled functional collectives, aot_eager")
def compiled_aot():
    call_thrice(compiled(chained, fullgraph=True))


@SCENARIOS.add("compiled functional collectives, inductor")
def compiled_inductor():
    call_thrice(compiled(chained, "inductor", fullgraph=True))


@SCENARIOS.add("compiled dist.all_reduce in a full graph")
def compiled_in_place():
    def reduce_in_place(x):
        doubled = 2 * x
        dist.all_reduce(doubled)
        return doubled + 1

    call_thrice(compiled(reduce_in_place, fullgraph=True))


@SCENARIOS.add("compiled with a graph break at an asynchronous all_reduce")
def compiled_with_break():
    def reduce_later(x):
        doubled = 2 * x
        dist.all_reduce(doubled, async_op=True).wait()
        return doubled + 1

    call_thrice(compiled(reduce_later))


@SCENARIOS.add("compiled DDP, DDPOptimizer")
def compiled_ddp():
    train(compiled(DistributedDataParallel(layers(8, 256), bucket_cap_mb=1.0)), 3, 256)


@SCENARIOS.add("compiled DDP, compiled autograd")
def compiled_ddp_and_autograd():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        train(compiled(DistributedDataParallel(layers())), 3)


@SCENARIOS.add("compiled module inside DDP")
def compiled_inside_ddp():
    train(DistributedDataParallel(compiled(layers())), 3)


@SCENARIOS.add("compiled FSDP2")
def compiled_fsdp2():
    train(compiled(fsdp2()), 3)


@SCENARIOS.add("compiled layers inside FSDP2")
def compiled_inside_fsdp2():
    model = fsdp2()
    for layer in model:
        layer.compile(backend="aot_eager")
    train(model, 3)


@SCENARIOS.add("compiled tensor parallel in a full graph")
def compiled_tensor_parallel():
    train(compiled(tensor_parallel(world_mesh("tp")), fullgraph=True), 3)
