"""Record device meshes: the names of their dimensions, the group of each, and where this rank lies."""

from typing import Any

from dtprof.capture.frameworks.attribution import Acting
from dtprof.capture.string_entries import entry


class Meshes:
    """Hooks into DeviceMesh, which makes groups, takes over groups of others, and joins dimensions."""

    def __init__(self, acting: Acting) -> None:
        """Keep who tells the recorder."""
        self._acting = acting

    def install(self) -> None:
        """Wait for the job to import DeviceMesh."""
        self._acting.after_import("torch.distributed.device_mesh", self._hook)

    def _hook(self, module: Any) -> None:
        mesh, after = module.DeviceMesh, self._acting.after
        # A slice of a mesh has the names and groups of the mesh, and needs no entry.
        after(mesh, "__init__", lambda _, made, *__, **___: self.declare(made))
        after(mesh, "from_group", lambda made, *_, **__: self.declare(made))
        after(mesh, "_create_unflatten_mesh", lambda made, *_, **__: self.declare(made))

    def declare(self, mesh: Any) -> None:
        """Write the entry of a mesh that has its groups, once for equal ones."""
        groups = getattr(mesh, "_dim_group_names", None)
        labels = self._acting.labels() if groups is not None else None
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
