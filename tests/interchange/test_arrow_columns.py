"""Columns as arrays of pyarrow equal those that pyarrow makes itself."""

import subprocess
import sys

import numpy as np
import pytest

from dtprof.interchange.public_tables import arrow_columns
from dtprof.interchange.public_tables.arrow_columns import arrow_array

pa = pytest.importorskip("pyarrow")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["int64", "float64", "bool", "string"])
def test_arrays_equal_those_of_pyarrow(kind: str, size: int, masked: bool) -> None:
    numbers = np.arange(size) - 3
    values = {
        "int64": numbers,
        "float64": numbers / 7,
        "bool": numbers % 3 == 0,
        "string": np.array(["", "send", "na\u00efve \u540d\u524d"], object)[numbers % 3],
    }[kind]
    mask = (numbers % 5 == 0) & masked
    type_of = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string()}[kind]
    made = arrow_array(pa, type_of, np.ma.array(values, mask=mask))
    made.validate(full=True)
    assert made.equals(pa.array(values, type=type_of, mask=mask, from_pandas=False))


def test_texts_that_are_no_unicode_and_those_too_long_for_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arrow_array(pa, pa.string(), np.array(["a\udc80b", "c"], object)).to_pylist() == ["a?b", "c"]
    monkeypatch.setattr(arrow_columns, "MOST_BYTES", 3)
    texts = np.ma.array(np.array(["all_reduce", "send"], object), mask=[False, True])
    assert arrow_array(pa, pa.string(), texts).to_pylist() == ["all_reduce", None]


def test_pandas_is_not_imported() -> None:
    program = (
        "import sys, numpy, pyarrow, dtprof.interchange.public_tables.arrow_columns as a; "
        "a.arrow_array(pyarrow, pyarrow.string(), numpy.array(['a'], object)); sys.exit('pandas' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
