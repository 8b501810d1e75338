"""Record device meshes: the names of their dimensions, the group of each, and the coordinate of this rank."""

from typing import Any

from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.string_entries import entry


def install(attribution: Attribution) -> None:
    """Hook DeviceMesh once the job imports it."""

    def hook(module: Any) -> None:
        mesh, after = module.DeviceMesh, attribution.after
        # A slice of a mesh has the names and groups of the mesh, and needs no entry.
        after(mesh, "__init__", lambda _, created, *__, **___: _declare(attribution, created))
        after(mesh, "from_group", lambda created, *_, **__: _declare(attribution, created))
        after(mesh, "_create_unflatten_mesh", lambda created, *_, **__: _declare(attribution, created))

    attribution.after_import("torch.distributed.device_mesh", hook)


def _declare(attribution: Attribution, mesh: Any) -> None:
    """Write the entry of a mesh that has its groups, once for equal meshes."""
    groups = getattr(mesh, "_dim_group_names", None)
    labels = attribution.labels() if groups is not None else None
    if groups is None or labels is None:
        return
    names = mesh.mesh_dim_names or ()
    if not labels.first_time(("mesh", names, tuple(groups), tuple(mesh.shape))):
        return
    coordinate = mesh.get_coordinate()
    labels.recorder.write_entry(
        entry(
            "mesh",
            device_type=mesh.device_type,
            names=list(names),
            shape=list(mesh.shape),
            coordinate=None if coordinate is None else list(coordinate),
            groups=list(groups),
            flattened=mesh._root_mesh is not None and mesh.ndim == 1,
        )
    )
