"""Short names of the functions that users call to issue operations."""

from dataclasses import dataclass

import numpy as np

from dtprof.columns import is_any, number_distinct
from dtprof.intervals import Column
from dtprof.records.sites import Site
from dtprof.records.tables import Array, RankTables

_BACKWARD = ("Tensor.backward", "backward")
_OF_DDP = ("all_reduce", "broadcast")
"""What DDP itself issues in passes: reductions of buckets and broadcasts of buffers. Its hooks carry labels."""
_SAYS_NOTHING = ("wrapper", "inner", "<lambda>", "<module>")
_MODULE_CALL = "Module._wrapped_call_impl"
CALLS = frozenset(
    (
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_single"),
        *("all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all"),
        *("all_to_all_single", "broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv"),
        "batch_isend_irecv",
    )
)
"""Names of calls of torch.distributed: where an operation goes by one, the program issued it."""
_MESSAGES = {"send": "isend", "recv": "irecv"}
"""Calls behind messages. A line that sends and receives in turn has one site, with the name of its first call."""


@dataclass(frozen=True, kw_only=True)
class Apis:
    """Short names, and for each operation the position of its own."""

    names: tuple[str, ...]
    of_operation: Column


def find_apis(tables: RankTables, operations: Array) -> Apis:
    """Name the call behind each operation of one rank."""
    uses_ddp = "ddp" in tables.features
    names: dict[str, int] = {"": 0}
    sites, place = number_distinct(operations["site"])
    numbers, instead = np.zeros((2, len(sites)), np.int64)
    for i, site in enumerate(map(tables.sites.get, sites.tolist())):
        numbers[i] = instead[i] = names.setdefault(_name(site, uses_ddp=uses_ddp), len(names))
        if _is_pass(site):
            instead[i] = names.setdefault(_name(site, uses_ddp=False), len(names))
    of_operation = numbers[place]
    if uses_ddp and (numbers != instead).any():
        is_ddps = is_any(operations["op"], [i for i, op in enumerate(tables.ops) if op in _OF_DDP])
        of_operation = np.where(is_ddps, of_operation, instead[place])
    for op, other in (("send", "recv"), ("recv", "send")):
        for wrong, right in ((other, op), (_MESSAGES[other], _MESSAGES[op])):
            if wrong in names and op in tables.ops:
                is_wrong = (of_operation == names[wrong]) & (operations["op"] == tables.ops.index(op))
                if is_wrong.any():
                    of_operation[is_wrong] = names.setdefault(right, len(names))
    return Apis(names=tuple(names), of_operation=of_operation)


def name_site(tables: RankTables, site: int, op: str) -> str:
    """Return the short name of the function called at a site of one rank for an operation of this name."""
    return _name(tables.sites.get(site), uses_ddp="ddp" in tables.features and op in _OF_DDP)


def _is_pass(site: Site | None) -> bool:
    """Say whether a forward or backward pass issued what nothing else says anything of: DDP, or another function."""
    return site is not None and site.label is None and not site.package and site.api in (*_BACKWARD, _MODULE_CALL)


def _name(site: Site | None, *, uses_ddp: bool) -> str:
    """Return the framework or package that issued an operation, else the short name of the user's call."""
    if site is None:
        return ""
    if site.label is not None:
        return site.label.api
    return site.package or short_name(site.api, uses_ddp=uses_ddp)


def short_name(api: str, *, uses_ddp: bool) -> str:
    """Return the short name of a call: "ddp" for DDP's own doing, else the last name; empty where that says nothing."""
    if api.startswith("DistributedDataParallel."):
        return "ddp init" if api.endswith(".__init__") else "ddp"
    if api in _BACKWARD:
        return "ddp" if uses_ddp else "backward"
    if api == _MODULE_CALL:
        return "ddp" if uses_ddp else "forward"
    if "profile_hook_step" in api:
        return "optimizer.step"
    name = api.replace(".<locals>", "").rsplit(".", 1)[-1]
    return "" if name in _SAYS_NOTHING else name
