"""Short names of the functions that users call to issue operations."""

from dataclasses import dataclass

import numpy as np

from dtprof.columns import number_distinct
from dtprof.intervals import Column
from dtprof.records.tables import Array, RankTables, Site

_BACKWARD = ("Tensor.backward", "backward")
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
    numbers = np.zeros(len(sites), np.int64)
    for i, site in enumerate(sites.tolist()):
        numbers[i] = names.setdefault(_name(tables.sites.get(site), uses_ddp=uses_ddp), len(names))
    of_operation = numbers[place]
    for op, other in (("send", "recv"), ("recv", "send")):
        for wrong, right in ((other, op), (_MESSAGES[other], _MESSAGES[op])):
            if wrong in names and op in tables.ops:
                is_wrong = (of_operation == names[wrong]) & (operations["op"] == tables.ops.index(op))
                if is_wrong.any():
                    of_operation[is_wrong] = names.setdefault(right, len(names))
    return Apis(names=tuple(names), of_operation=of_operation)


def name_site(tables: RankTables, site: int) -> str:
    """Return the short name of the function called at a site of one rank."""
    return _name(tables.sites.get(site), uses_ddp="ddp" in tables.features)


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
