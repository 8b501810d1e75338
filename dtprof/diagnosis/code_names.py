"""The names behind codes of records, equal to those of the format of runs (a test compares them)."""

# fmt: off
DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2", "quint2x4", "bits1x8", "bits2x4",
    "bits4x2", "bits8", "bits16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16",
    "uint32", "uint64",
)
# fmt: on
REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


def dtype_name(code: int) -> str:
    """Return the name of an element type."""
    return DTYPES[code] if code < len(DTYPES) else f"element type {code}"


def reduce_op_name(code: int) -> str:
    """Return the name of a reduction."""
    return REDUCE_OPS[code] if code < len(REDUCE_OPS) else f"reduction {code}"
