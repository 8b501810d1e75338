"""Record device meshes: the names of their dimensions, the group of each, and the coordinate of this rank."""

import threading
from typing import Any

from dtprof import torch_versions
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.string_entries import entry


def install(attribution: Attribution) -> None:
    """Hook DeviceMesh once the job imports it."""

    def hook(module: Any) -> None:
        import torch

        mesh, after = module.DeviceMesh, attribution.after
        flattening = threading.local()

        def declare(created: Any) -> None:
            _declare(attribution, created, flattening)

        # A slice of a mesh has the names and groups of the mesh, and needs no entry.
        after(mesh, "__init__", lambda _, created, *__, **___: declare(created))
        after(mesh, "from_group", lambda created, *_, **__: declare(created))
        if not torch_versions.is_older_than(torch.__version__, (2, 10)):
            after(mesh, "_create_unflatten_mesh", lambda created, *_, **__: declare(created))
            return
        attribution.around(
            type(module._mesh_resources),
            "create_flatten_mesh",
            lambda *_, **__: setattr(flattening, "now", True),
            lambda *_: setattr(flattening, "now", False),
        )

    attribution.after_import("torch.distributed.device_mesh", hook)


def dimension_groups(mesh: Any) -> list[str] | None:
    """Return the names of the groups of a mesh's dimensions; None where it has none yet."""
    names = getattr(mesh, "_dim_group_names", None)
    if names is not None:
        return list(names)
    described = getattr(mesh, "_dim_group_infos", None)  # tag, ranks and name of each: torch before 2.8
    return None if described is None else [name for _, _, name in described]


def _declare(attribution: Attribution, mesh: Any, flattening: threading.local) -> None:
    """Write the entry of a mesh that has its groups, once for equal meshes.

    Parameters:
        flattening: `now` where this thread makes one dimension out of several; newer meshes tell so themselves.
    """
    groups = dimension_groups(mesh)
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
            groups=groups,
            flattened=getattr(flattening, "now", getattr(mesh, "_root_mesh", None) is not None) and mesh.ndim == 1,
        )
    )
