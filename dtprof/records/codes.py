"""The codes of records by name, and the names behind codes: `schema` declares both."""

from dtprof.records import schema

COLLECTIVE, POINT_TO_POINT = schema.KIND["collective"], schema.KIND["p2p"]
ISSUED, RETURNED, DONE, FAILED = (schema.STATE[name] for name in ("issued", "returned", "done", "failed"))
ASYNC, COMPLETION_SEEN, DEVICE = schema.FLAG["async"], schema.FLAG["completion"], schema.FLAG["device"]
INFERRED_SITE, SKIPPED, ASKED = schema.FLAG["inferred_site"], schema.FLAG["skipped"], schema.FLAG["asked"]
FOLLOWED, NO_WORK = schema.FLAG["followed"], schema.FLAG["no_work"]
DEVICE_OPERATION, DEVICE_WAIT, DEVICE_PHASE = (
    schema.KIND[name] for name in ("device_operation", "device_wait", "device_phase")
)
DEVICE_ON_STREAM, DEVICE_POLLED, DEVICE_P2P, DEVICE_EXACT, DEVICE_SEVERAL = (
    schema.DEVICE_FLAG[name] for name in ("on_stream", "polled", "p2p", "exact", "several")
)
NONE = schema.NO_CODE
DTYPES = tuple(name for name, _ in schema.DTYPES)
DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
FLOATS = tuple(code for name, code in DTYPE_CODES.items() if name.startswith(("float", "bfloat")))
SIZES = (DTYPE_CODES["int32"], DTYPE_CODES["int64"])
"""Element types of sizes that ranks exchange before what has them."""
REDUCE_OPS = schema.REDUCE_OPS


def dtype_name(code: int) -> str:
    """Return the name of an element type."""
    return DTYPES[code] if code < len(DTYPES) else f"element type {code}"


def reduce_op_name(code: int) -> str:
    """Return the name of a reduction."""
    return REDUCE_OPS[code] if code < len(REDUCE_OPS) else f"reduction {code}"
