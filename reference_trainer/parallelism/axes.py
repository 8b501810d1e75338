"""The one mesh of all ranks, its axes, and the groups that sums go over."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reference_trainer.layout import Layout

# From the slowest to the fastest network: tensor-parallel ranks are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard", "cp")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Hold the mesh; an axis of one rank is mostly left out of it, and None."""

    mesh: DeviceMesh | None
    loss_group: distributed.ProcessGroup | None

    def find(self, *names: str) -> DeviceMesh | None:
        """Return one axis, or several as one; None where it would be this rank alone."""
        if self.mesh is None or self.mesh.mesh_dim_names is None:
            return None
        present = tuple(name for name in names if name in self.mesh.mesh_dim_names)
        if len(present) <= 1:
            return self.mesh[present[0]] if present else None
        return _flatten(self.mesh, present)

    def size(self, *names: str) -> int:
        """Return the number of ranks along axes."""
        axis = self.find(*names)
        return 1 if axis is None else axis.size()

    def rank(self, *names: str) -> int:
        """Return the place of this rank along axes."""
        axis = self.find(*names)
        return 0 if axis is None else axis.get_local_rank()

    def group(self, *names: str) -> distributed.ProcessGroup | None:
        """Return the group of the ranks along axes, or None for this rank alone."""
        axis = self.find(*names)
        return None if axis is None else axis.get_group()

    @property
    def num_data_ranks(self) -> int:
        """Return the number of ranks that see other tokens, over which gradients are averaged."""
        return self.size(*DATA_AXES)

    def find_shards(self) -> DeviceMesh:
        """Return what FSDP shards over: one axis, or replicas of shards."""
        shards = self.find("dp_shard", "cp")
        assert shards is not None
        assert self.mesh is not None
        if self.find("dp_replicate") is None:
            return shards
        assert shards.mesh_dim_names is not None
        return self.mesh["dp_replicate", shards.mesh_dim_names[0]]

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Add up a number over all ranks that see other tokens."""
        group = self.group(*DATA_AXES)
        if group is not None:
            distributed.all_reduce(value, group=group)
        return value


def build_axes(layout: Layout, precision: str, device: torch.device) -> Axes:
    """Arrange the ranks of the job; every rank must call this.

    The loss has a group of its own so that it cannot be mixed up with gradients: in one group, a rank that leaves out
    the all_reduce of the loss would send its next gradient bucket where the others expect the loss, and gloo would
    fail with two sizes that do not match, or mix the values, rather than wait.
    """
    if not distributed.is_initialized():
        return Axes(mesh=None, loss_group=None)
    sharded = layout.dp_mode in ("fsdp", "hsdp")
    num_replicas = layout.num_replicas if sharded else layout.dp
    sizes = dict(zip(AXES, (layout.pp, num_replicas, layout.dp // num_replicas, layout.cp, layout.tp), strict=True))
    # An axis of one rank is left out, unless bf16 needs the wrapper of data parallelism, which holds fp32 weights.
    kept = "dp_shard" if sharded else "dp_replicate"
    casts = precision == "bf16" and not layout.has_plain_parameters and layout.dp * layout.cp == 1
    present = {name: size for name, size in sizes.items() if size > 1 or (casts and name == kept)} or {kept: 1}
    mesh = init_device_mesh(device.type, tuple(present.values()), mesh_dim_names=tuple(present))
    loss_group = cast(distributed.ProcessGroup, distributed.new_group(group_desc="loss"))
    return Axes(mesh=mesh, loss_group=loss_group)


def _flatten(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return several axes as one; the mesh keeps it under its name, so that it is made once."""
    name = "_".join(names)
    try:
        return mesh[name]
    except KeyError:
        return mesh[names]._flatten(name)
