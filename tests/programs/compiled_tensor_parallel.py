"""Run a compiled tensor-parallel model on one rank and compare it with itself uncompiled; no break of the graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(2, 8)
    expected = model(x)
    expected.sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), gradient)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
