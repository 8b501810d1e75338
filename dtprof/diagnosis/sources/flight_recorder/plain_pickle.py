"""Pickles from elsewhere: plain containers, numbers and strings are built, nothing is ever called or imported."""

import contextlib
import io
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ALLOWANCE_BYTES = 256 << 20
BYTES_FOR_ONE = 24
MAX_ALLOWANCE_BYTES = 4 << 30
"""Memory that reading a pickle may take: so much, so much for each of its bytes, and so much at most."""

_FAILURES = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class PlainPickleError(Exception):
    """The bytes are no pickle of plain values."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it wants to load {module[:60]}.{name[:60]}, which a plain pickle never does")


def read_plain_pickle(data: bytes) -> Any:
    """Return the value that a pickle holds.

    Raises:
        PlainPickleError: it is none, is cut off, wants code to be run, or takes more memory than its size explains.
    """
    allowance = min(MAX_ALLOWANCE_BYTES, ALLOWANCE_BYTES + BYTES_FOR_ONE * len(data))
    try:
        # Refused a bytearray's memory, CPython complains on stderr besides raising.
        with bounded_memory(allowance), contextlib.redirect_stderr(io.StringIO()):
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(data))).load()
    except MemoryError:
        raise PlainPickleError(f"it wants more than {allowance >> 20} MiB for {len(data)} bytes") from None
    except EOFError:
        raise PlainPickleError("it is cut off") from None
    except _FAILURES as error:
        raise PlainPickleError(str(error)[:200] or type(error).__name__) from None


@contextlib.contextmanager
def bounded_memory(allowance_bytes: int) -> Iterator[None]:
    """Let this process take only so much more address space: a pickle may ask for any amount in five bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # no Linux: the size of the file is the only bound
        yield
        return
    bound = taken + allowance_bytes
    for limit in (soft, hard):
        bound = bound if limit == resource.RLIM_INFINITY else min(bound, limit)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
