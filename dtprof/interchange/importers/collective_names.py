"""Names of operations, element types and reductions in back ends, kernels and frameworks."""

import re

from dtprof.diagnosis.sources.flight_recorder.dump_fields import dtype_code, parse_name
from dtprof.records import schema

_KERNEL = re.compile(
    r"(AllReduce|AllGather|ReduceScatter|Broadcast|SendRecv|AllToAll|Reduce)(?:_(\w+?)_(\w+?)(?:_|$|\())?"
)
_OF_KERNEL = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AllToAll": "all_to_all",
    "SendRecv": "sendrecv",
}
_REDUCTIONS = {
    "sum": "sum",
    "prod": "product",
    "min": "min",
    "max": "max",
    "premulsum": "premul_sum",
    "sumpostdiv": "avg",
    "avg": "avg",
}


def operation_name(name: str) -> str:
    """Return the common name of a collective or message for a back end's name."""
    op = parse_name(name)[1][0].strip("_")
    return op or "unknown"


def of_kernel(name: str) -> tuple[str, int, int]:
    """Return operation, code of the reduction and of the element type from the name of an NCCL or RCCL kernel."""
    match = _KERNEL.search(name)
    if match is None:
        return "unknown", schema.NO_CODE, schema.NO_CODE
    op = _OF_KERNEL[match[1]]
    reduction = _REDUCTIONS.get((match[2] or "").lower(), "")
    code = schema.REDUCE_OPS.index(reduction) if reduction else schema.NO_CODE
    reduces = op in ("all_reduce", "reduce_scatter", "reduce")
    return op, code if reduces else schema.NO_CODE, dtype_code(match[3])
