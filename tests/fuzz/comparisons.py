"""Comparisons of arrays in code that atheris watches, past its hook: that never lets go of a result that is no bool."""

import dis
import operator
from typing import Any

import atheris
import numpy as np

_BY_NUMBER = [
    {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}[op]
    for op in dis.cmp_op
]


def pass_arrays_by() -> None:
    """Let atheris see all comparisons but those of arrays, which tell a fuzzer nothing."""
    watched = atheris._trace_cmp

    def compare(left: Any, right: Any, number: int, *place: Any) -> Any:
        if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
            return _BY_NUMBER[number](left, right)
        return watched(left, right, number, *place)

    atheris._trace_cmp = compare
