"""Columns as arrays of pyarrow, made from their memory.

pyarrow's own way from numpy imports pandas where that is installed, which takes longer than to write a small run.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BYTES = np.iinfo(np.int32).max
"""Of the texts of one array."""


def arrow_array(pa: Any, kind: Any, values: npt.NDArray[Any]) -> Any:
    """Return a column as an array of this type of `pa`, the module pyarrow; masked values are null."""
    known = None
    if isinstance(values, np.ma.MaskedArray) and (missing := np.ma.getmaskarray(values)).any():
        known = _bits(pa, ~missing)
    data = np.ma.getdata(values)
    if kind == pa.string():
        return _texts(pa, values, data, known)
    memory = _bits(pa, data) if kind == pa.bool_() else pa.py_buffer(np.ascontiguousarray(data))
    return pa.Array.from_buffers(kind, len(data), [known, memory])


def _bits(pa: Any, values: npt.NDArray[Any]) -> Any:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def _texts(pa: Any, values: npt.NDArray[Any], data: npt.NDArray[Any], known: Any) -> Any:
    texts = data.tolist() if known is None else ["" if text is None else text for text in values.tolist()]
    joined = "".join(texts)
    if joined.isascii():
        memory, lengths = joined.encode(), map(len, texts)
    else:
        encoded = [text.encode("utf-8", "replace") for text in texts]
        memory, lengths = b"".join(encoded), map(len, encoded)
    if len(memory) > MOST_BYTES:
        return pa.array(texts, type=pa.string(), mask=np.ma.getmaskarray(values))
    ends = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, len(texts)), out=ends[1:])
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(ends), pa.py_buffer(memory), known)
