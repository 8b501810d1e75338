"""Set operations and percentiles of numpy columns, where numpy's own are slower.

np.unique hashes, which takes 3 to 13 times as long as sorting (numpy 2.4, 1,000 to 1,000,000 numbers). It,
np.median and np.percentile also load numpy.ma, which takes each process some 20 ms.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dtprof.intervals import Column, Floats, Mask

Number = TypeVar("Number", bound=np.generic)
MOST_COUNTED = 1 << 14
"""Places of a table of counts, up to which it costs less than to sort some thousand rows."""


def distinct(column: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return the values of a column in ascending order, each once; NaN is not among them."""
    in_order = np.sort(column, axis=None)
    return in_order[begins_of(in_order)]


def number_distinct(values: npt.NDArray[np.integer[Any]]) -> tuple[Column, Column]:
    """Return the distinct values in ascending order, and for each row the position of its own.

    Fast where few are distinct, or all are small.
    """
    few: Column = distinct(values[: 1 << 10]).astype(np.int64)
    if len(few) == 1 and (values == few[0]).all():
        return few, np.zeros(len(values), np.int64)
    if len(few) and few[0] >= 0 and values.min() >= 0 and (largest := int(values.max())) < 4 * len(values):
        present = np.bincount(values, minlength=largest + 1) > 0
        return np.flatnonzero(present), (np.cumsum(present) - 1)[values]
    place = np.minimum(np.searchsorted(few, values), len(few) - 1)
    if np.array_equal(few[place], values):
        return few, place
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    begins = begins_of(in_order)
    place[order] = np.cumsum(begins) - 1
    return in_order[begins].astype(np.int64), place


def number_alike(*columns: npt.NDArray[np.integer[Any]]) -> tuple[Column, Column]:
    """Number rows in ascending order of their values, column by column; rows alike in all columns share a number.

    Returns:
        the number of each row, and the first row of each number.
    """
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = number_distinct(column)
        _, number = number_distinct(number * len(values) + place)  # at once: the product of all may overflow
    order = np.argsort(number, kind="stable")
    return number, order[begins_of(number[order])]


def mean_of_each(number: Column, values: npt.NDArray[Any]) -> Floats:
    """Return the mean of the values of each number; rows have all numbers from 0 on."""
    means: Floats = np.bincount(number, values) / np.bincount(number)
    return means


def begins_of(*columns: npt.NDArray[Any]) -> Mask:
    """Say which rows differ from the row before in any column: the first one does."""
    begins = np.zeros(len(columns[0]), np.bool_)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins


def count_alike(columns: Sequence[Column]) -> list[Column]:
    """Return the different rows of several columns, column by column, and last how often there is each."""
    if len(columns[0]):
        lows = [int(column.min()) for column in columns]
        sizes = tuple(int(column.max()) - low + 1 for column, low in zip(columns, lows, strict=True))
        if math.prod(sizes) <= max(len(columns[0]), MOST_COUNTED):
            places = np.ravel_multi_index([column - low for column, low in zip(columns, lows, strict=True)], sizes)
            counts = np.bincount(places)
            found = np.flatnonzero(counts)
            indices = np.unravel_index(found, sizes)
            return [*(index + low for index, low in zip(indices, lows, strict=True)), counts[found]]
    number, first = number_alike(*columns)
    return [*(column[first] for column in columns), np.bincount(number)]


def median(values: npt.ArrayLike) -> float:
    """Return the median of all values; NaN of none, and where one is NaN."""
    (found,) = percentiles(values, (50,))
    return found


def known_medians(table: Floats) -> Floats:
    """Return the median of each column over its rows that are not NaN; NaN where none is."""
    known = ~np.isnan(table).all(axis=0)
    medians = np.full(table.shape[1], np.nan)
    medians[known] = np.nanmedian(table[:, known], axis=0)
    return medians


def percentiles(values: npt.ArrayLike, percents: Sequence[float]) -> list[float]:
    """Return percentiles of all values, linear between neighbours; NaN of none, and where one is NaN."""
    in_order = np.sort(np.asarray(values, np.float64), axis=None)
    if not len(in_order) or np.isnan(in_order[-1]):
        return [float("nan")] * len(percents)
    place = np.asarray(percents) / 100 * (len(in_order) - 1)
    before = place.astype(np.int64)
    share = place - before
    after = np.minimum(before + 1, len(in_order) - 1)
    found: list[float] = (in_order[before] * (1 - share) + in_order[after] * share).tolist()
    return found


def is_any(column: npt.NDArray[np.integer[Any]], values: Iterable[int]) -> Mask:
    """Say which rows hold one of a few values, as np.isin does, which takes longer for short columns."""
    found = np.zeros(len(column), np.bool_)
    for value in values:
        found |= column == value
    return found


def is_among(column: Column, values: Column) -> Mask:
    """Say which rows hold one of many values, which are sorted; at once where the column is just these."""
    if not len(values) or np.array_equal(column, values):
        return np.full(len(column), len(values) > 0)
    found: Mask = values[np.minimum(np.searchsorted(values, column), len(values) - 1)] == column
    return found
