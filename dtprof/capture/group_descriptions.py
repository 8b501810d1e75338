"""Describe a process group: from its object, from torch.distributed, and from the frameworks that created it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dtprof import fence
from dtprof.capture.string_entries import entry
from dtprof.records.axis_names import axis_of, plain_axis

MEGATRON, DEEPSPEED = "megatron.core.parallel_state", "deepspeed.utils.groups"
_naming_modules = [MEGATRON, DEEPSPEED]
"""Keep their groups in globals such as `_TENSOR_MODEL_PARALLEL_GROUP`, some as a dict or list of groups."""
MAX_LISTED = 16
"""A larger group is written as a range where its members are evenly spaced."""
_GRID = {"dp_proc_group": "dp", "pp_proc_group": "pp", "slice_proc_group": "tp", "ds_model_proc_group": "mp"}
"""Attributes of the grid of a DeepSpeed pipeline, which `deepspeed.utils.groups.mpu` holds."""


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
        name=name_of(group),
        description=group.group_desc,
        size=group.size(),
        rank=group.rank(),
    )


def name_of(group: Any) -> str:
    """Return the name of a group: of one that torch has not named, as those of torchft, a name by its object."""
    try:
        return str(group.group_name)
    except (RuntimeError, ValueError):  # ProcessGroup name not set: which of the two depends on torch
        return f"{type(group).__name__} {id(group):#x}"


ids: dict[str, int] = {}
"""Ids by name of the groups in torch.distributed's list."""
_splits: dict[str, tuple[list[int], str, float | None]] = {}
"""Members, back end and timeout of groups made by `split_group`, by name; of equal names the newest."""
_on_nccl: list[Callable[[], None]] = []


def on_first_nccl_group(call: Callable[[], None]) -> None:
    """Call this at the first process group of this process that uses NCCL."""
    _on_nccl[:] = [call]


def remember_split(group: Any, parent: Any, ranks: Sequence[int]) -> None:
    """Remember a group split off a parent group; `ranks` are the parent's numbers of its members."""
    import torch.distributed.distributed_c10d as c10d

    if group is None:
        return  # this rank is not in it
    if parent in c10d._world.pg_map:
        of_parent = c10d.get_process_group_ranks(parent)
    elif parent.group_name in _splits:
        of_parent, _, _ = _splits[parent.group_name]
    else:
        return
    # Not from the options of the new back end: those of gloo name wrong members (torch 2.13).
    backend = group._get_backend(group._device_types[0]).name()
    _splits[group.group_name] = [of_parent[rank] for rank in sorted(ranks)], backend, _timeout_s(group)


@fence.fenced("the members of a process group")
def members_entry(group_id: int, name: str) -> str:
    """Return the lines with members, back end, timeout and axis, as far as torch and the frameworks know the group."""
    return "\n".join(filter(None, (_members_entry(group_id, name), named_axis_entry(name))))


def _members_entry(group_id: int, name: str) -> str:
    import torch.distributed.distributed_c10d as c10d

    group = _group_named(name)
    if group is None:
        if name not in _splits:
            return ""
        ranks, backend, timeout_s = _splits[name]
        return entry("group", id=group_id, name=name, **members_of(ranks), backend=backend, timeout_s=timeout_s)
    backend, _ = c10d._world.pg_map[group]
    ids[name] = group_id
    # Once, at the first group: a job without NCCL never starts what reads its events.
    while "nccl" in backend and _on_nccl:
        _on_nccl.pop()()
    return entry(
        "group",
        id=group_id,
        name=name,
        **members_of(c10d.get_process_group_ranks(group)),
        backend=backend,
        timeout_s=_timeout_s(group),
    )


def members_of(ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the field of an entry with the members of a group: a range for many evenly spaced ranks."""
    if len(ranks) > MAX_LISTED:
        stride = ranks[1] - ranks[0]
        if list(ranks) == [ranks[0] + stride * i for i in range(len(ranks))]:
            return {"range": [ranks[0], len(ranks), stride]}
    return {"ranks": list(ranks)}


def _group_named(name: str) -> Any:
    """Return a group by name from torch.distributed, without a scan of all groups; None where it has none."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        group = resolve(name)
    except RuntimeError:
        return None
    return group if group in c10d._world.pg_map else None


def _timeout_s(group: Any) -> float | None:
    import torch

    for device in ("cpu", "cuda"):
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return None


def read_axes_of(module_name: str) -> None:
    """Read the axes of groups from the variables of this module, too, a copy of those of Megatron or DeepSpeed."""
    if module_name not in _naming_modules:
        _naming_modules.append(module_name)


@fence.fenced("the axis of a process group")
def named_axis_entry(name: str) -> str:
    """Return the entry with the axis for which Megatron or DeepSpeed use a group, or an empty string.

    This reads their variables: some of their getters create groups. The variables are set after the group was created,
    so call this at its first operation.
    """
    for module_name in _naming_modules:
        module = sys.modules.get(module_name)
        groups = _named_groups(vars(module)) if module is not None else ()
        axes = [(axis, group) for axis, group in groups if hasattr(group, "rank")]
        for axis, group in axes:
            if name_of(group) == name:
                sizes = {other: members.size() for other, members in axes}
                return entry("axis", group=name, axis=plain_axis(axis, group.size(), sizes), by=module_name)
    return ""


def _named_groups(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for variable, value in list(variables.items()):
        if "_GROUP" in variable and (axis := axis_of(variable)):
            if isinstance(value, Mapping):
                yield from ((axis, group) for group in value.values())
            elif isinstance(value, list | tuple):
                yield from ((axis, group) for group in value)
            else:
                yield axis, value
    grid = getattr(variables.get("mpu"), "__dict__", {})
    yield from ((axis, grid[name]) for name, axis in _GRID.items() if name in grid)
