"""Names of the axes of parallelism, as meshes, Megatron and DeepSpeed write them."""

from collections.abc import Mapping

_BY_NAME = {
    "data": "dp",
    "data_parallel": "dp",
    "replicate": "dp_replicate",
    "data_parallel_replicate": "dp_replicate",
    "shard": "dp_shard",
    "data_parallel_shard": "dp_shard",
    "tensor": "tp",
    "pipeline": "pp",
    "pipe": "pp",
    "context": "cp",
    "expert": "ep",
    "data_parallel_with_cp": "dp_cp",
    "tensor_model_parallel": "tp",
    "tensor_parallel": "tp",
    "pipeline_model_parallel": "pp",
    "pipeline_parallel": "pp",
    "context_parallel": "cp",
    "sequence_parallel": "sp",
    "sequence_data_parallel": "sp_dp",
    "expert_model_parallel": "ep",
    "expert_parallel": "ep",
    "expert_data_parallel": "edp",
    "expert_tensor_parallel": "etp",
    "tensor_and_data_parallel": "tp_dp",
    "tensor_and_context_parallel": "tp_cp",
    "model_parallel": "mp",
    "embedding": "embd",
    "position_embedding": "pos_embd",
}
_AXES = {"dp", "tp", "pp", "cp", "ep", "sp", "fsdp", "ddp", "hsdp", "dp_replicate", "dp_shard"}
KNOWN_AXES = frozenset((*_AXES, *_BY_NAME.values()))
"""Axes whose ranks are known to share data or not; a mesh may have dimensions of any other name."""
_MESH = "mesh_"
_JOINED = {
    "dp_cp": ("dp", "cp"), "tp_dp": ("tp", "dp"), "tp_cp": ("tp", "cp"), "sp_dp": ("sp", "dp"), "mp": ("tp", "pp"),
}  # fmt: skip
"""Axes that join two others."""


def axis_of(name: str) -> str | None:
    """Return the axis that a group's description, or a framework's name for the group, means; None: no axis.

    DeviceMesh writes `mesh_NAME`, Megatron `TENSOR_MODEL_PARALLEL_GROUP`, DeepSpeed `_EXPERT_PARALLEL_GROUP`.
    """
    plain = name.strip("_").lower()
    if plain.startswith(_MESH):
        axis = plain.removeprefix(_MESH)
        return None if axis.removeprefix("dim_").isdigit() else canonical_axis(axis)
    plain = plain.removesuffix("_gloo").replace("_group", "")
    return plain if plain in _AXES else _BY_NAME.get(plain)


def canonical_axis(dimension: str) -> str:
    """Return the axis of a dimension of a mesh; an unknown name unchanged."""
    plain = dimension.lower()
    return plain if plain in _AXES else _BY_NAME.get(plain, dimension)


def plain_axis(axis: str, size: int, sizes: Mapping[str, int]) -> str:
    """Return the axis of a group of this size without those of one rank that it joins: `dp_cp` without `cp` is `dp`.

    Parameters:
        sizes: of the groups of each axis that the rank is a member of.
    """
    joined = _JOINED.get(axis)
    for part, other in (joined, joined[::-1]) if joined else ():
        if sizes.get(part) == size and sizes.get(other, 1) == 1:
            return part
    return axis
