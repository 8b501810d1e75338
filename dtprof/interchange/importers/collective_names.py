"""What back ends, kernels and frameworks call operations, element types and reductions."""

import re

from dtprof.diagnosis.sources.flight_recorder.dump_fields import parse_name
from dtprof.interchange.importers.imported_records import DTYPE_CODES
from dtprof.records import schema

DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "c10::half": "float16",
    "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "bool": "bool",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "s32": "int32",
    "s64": "int64",
    "u8": "uint8",
    "u32": "uint32",
    "u64": "uint64",
    "pred": "bool",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
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


def dtype_code(name: object) -> int:
    """Return the code of an element type as any of the formats calls it; NO_CODE for one that is not known."""
    if not isinstance(name, str):
        return schema.NO_CODE
    lower = name.lower()
    return DTYPE_CODES.get(DTYPES.get(lower, lower), schema.NO_CODE)


def operation_name(name: str) -> str:
    """Return the common name of a collective or message from what a back end calls it."""
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
