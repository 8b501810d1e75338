"""Algorithm and bus bandwidth as nccl-tests define them."""


def bus_factor(op: str, n: int) -> float | None:
    """Return the factor from algorithm to bus bandwidth, None where none is defined.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if n < 2:
        return None
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("reduce_scatter", "all_gather", "all_to_all"):
        return (n - 1) / n
    return 1.0 if op in ("broadcast", "reduce", "send", "recv") else None


def total_bytes(op: str, nbytes: int, n: int) -> int:
    """Return S of nccl-tests from the bytes one rank puts in; only all_gather's input is a part of it."""
    return nbytes * n if op == "all_gather" else nbytes
