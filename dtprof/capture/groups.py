"""Describe a process group: what its own object says, and what only torch.distributed knows."""

from typing import Any

from dtprof import fence
from dtprof.capture.entries import entry


def uses_gloo(group: Any) -> bool:
    """Say whether CPU tensors of this group travel through gloo, whose completions can be observed."""
    import torch

    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError:
        return False


def first_entry(group_id: int, group: Any) -> str:
    """Return the entry that declares the id."""
    return entry(
        "group",
        id=group_id,
        name=group.group_name,
        description=group.group_desc,
        size=group.size(),
        rank=group.rank(),
    )


@fence.fenced("the members of a process group")
def members_entry(group_id: int, name: str) -> str:
    """Return the entry with members, back end and timeout, or an empty string where torch does not know the group."""
    import torch.distributed.distributed_c10d as c10d

    for group, (backend, _) in list(c10d._world.pg_map.items()):
        if group.group_name == name:
            return entry(
                "group",
                id=group_id,
                name=name,
                ranks=c10d.get_process_group_ranks(group),
                backend=backend,
                timeout_s=_timeout_s(group),
            )
    return ""


def _timeout_s(group: Any) -> float | None:
    import torch

    for device in ("cpu", "cuda"):
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return None
