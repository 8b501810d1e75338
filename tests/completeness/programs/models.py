"""Models, steps, meshes and the list of scenarios that the families of scenarios share."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH = 16


class Scenarios:
    """The scenarios of one family, in order."""

    def __init__(self, section):
        self.section = section
        self.all = []

    def add(self, name, ranks=(2,), refused=None):
        """List a function; `ranks` are the numbers of ranks it runs on, `refused` what torch says if it refuses."""

        def listed(function):
            self.all.append((name, ranks, refused, function))
            return function

        return listed


class FeedForward(nn.Module):
    """The layers that tensor parallelism splits."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.out(torch.relu(self.into(self.norm(x))))


def layers(n=3, width=WIDTH):
    return nn.Sequential(*[layer for _ in range(n) for layer in (nn.Linear(width, width), nn.ReLU())])


def batch(width=WIDTH):
    return torch.randn(4, width)


def train(model, steps=2, width=WIDTH, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch(width)).sum().backward()
        optimizer.step()


@functools.cache
def mesh(*sizes_and_names):
    """Return a mesh of these sizes with these names of dimensions: mesh(2, 2, "dp", "tp")."""
    half = len(sizes_and_names) // 2
    return init_device_mesh("cpu", sizes_and_names[:half], mesh_dim_names=sizes_and_names[half:])


def world_mesh(name):
    return mesh(dist.get_world_size(), name)
