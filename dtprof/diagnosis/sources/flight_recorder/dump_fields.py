"""Fields of Flight Recorder dumps, taken only where they have the expected type."""

import re
from collections.abc import Iterable

from dtprof.job.group_collectives import agrees_in_size
from dtprof.records import codes

_DTYPES = {
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
MAX_RANK = 1 << 24
MAX_SEQ = 1 << 62
MAX_TENSORS = 4096
MAX_DIMS = 64
MAX_TEXT = 1000

_P2P_NAME = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")
_OPS = (
    ("barrier", "barrier"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("all_gather", "all_gather"),
    ("allgather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("scatter", "scatter"),
    ("gather", "gather"),
)


def parse_name(name: str) -> tuple[str, tuple[str, bool, tuple[int, int] | None]]:
    """Return backend, operation, whether sizes must agree, and sender and receiver, from a profiling name."""
    backend, _, raw = name.rpartition(":")
    if match := _P2P_NAME.match(raw):
        ours, other = int(match[2]), int(match[3])
        return backend, (match[1], False, (ours, other) if match[1] == "send" else (other, ours))
    if raw == "coalesced":
        return backend, (raw, False, None)
    op = next((known for part, known in _OPS if part in raw), raw or "unknown")
    return backend, (op, agrees_in_size(op, raw), None)


def dtype_code(name: object) -> int:
    """Return the code of an element type as any of the formats calls it; codes.NONE for one that is not known."""
    if not isinstance(name, str):
        return codes.NONE
    lower = name.lower()
    return codes.DTYPE_CODES.get(_DTYPES.get(lower, lower), codes.NONE)


def text(value: object) -> str:
    """Return a string or whole number as text, empty for anything else."""
    if isinstance(value, bool):
        return ""
    if isinstance(value, int) and abs(value) < MAX_SEQ:
        return str(value)
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def integer(value: object, default: int = 0) -> int:
    """Return a whole number of at most 62 bits, the default for anything else."""
    return value if type(value) is int and -MAX_SEQ < value < MAX_SEQ else default


def rank_numbers(value: object) -> tuple[int, ...]:
    """Return member ranks, which pickles hold as the text of a list."""
    found: Iterable[object] = ()
    if isinstance(value, str):
        found = [int(found) for found in re.findall(r"\d{1,9}", value[: 16 << 20])]
    elif isinstance(value, list | tuple):
        found = value
    return tuple(rank for rank in found if type(rank) is int and 0 <= rank < MAX_RANK)


def first_text(values: object) -> str:
    """Return the first string of a list, empty where there is none."""
    return values[0] if type(values) is list and values and type(values[0]) is str else ""


def numel(sizes: object) -> int:
    """Return the elements of all tensors, -1 where unknown."""
    if type(sizes) is not list or not sizes:
        return -1
    total = 0
    for size in sizes[:MAX_TENSORS] if len(sizes) > MAX_TENSORS else sizes:
        if type(size) is not list or len(size) > MAX_DIMS:
            return -1
        product = 1
        for extent in size:
            if type(extent) is not int or not 0 <= extent < MAX_SEQ:
                return -1
            product *= extent
        total += product
    return total
