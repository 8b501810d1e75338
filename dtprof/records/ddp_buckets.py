"""Tell the buckets of DistributedDataParallel apart: its reducer issues them with no frame of Python of its own.

Within a backward pass a reducer reduces its buckets in their order. An all_reduce on its group that carries no label,
and whose size is that of the bucket whose turn it is, is that bucket; a communication hook may send half the bytes.
Where parameters may be unused, ranks also tell each other which they used, a number each. What is left was issued for
DDP all the same where the user called nothing but the backward pass: sparse gradients, callbacks of a hook.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dtprof.records import events, schema
from dtprof.records.tables import UNKNOWN_NS, Array, Group, Label, Site

_COMPRESSION = (1, 2)
_ALL_REDUCE = "all_reduce"
_INT32 = [name for name, _ in schema.DTYPES].index("int32")
_REDUCTION = Label(api="ddp", text="ddp reduction of gradients")
_CALLS_OF_BACKWARD = ("Tensor.backward", "backward")
_USED_PARAMETERS = Label(api="ddp", text="ddp map of used parameters")
_BACKWARD = (events.BACKWARD, *events.PIPELINE_BACKWARD)


class Layout(NamedTuple):
    """The buckets of one reducer from a time on."""

    t_ns: int
    reducer: int
    group: str
    sizes: tuple[int, ...]  # bytes
    num_parameters: int


def label_buckets(
    operations: Array,
    spans: Array,
    *,
    ops: Sequence[str],
    groups: dict[int, Group],
    sites: dict[int, Site],
    layouts: Sequence[Layout],
) -> None:
    """Give the all_reduces of buckets sites with a label, new ones in `sites`."""
    if not layouts or not len(operations):
        return
    new_sites: dict[tuple[int, Label], int] = {}
    for rows in _by_backward(operations, spans, ops):
        for group, own in _by_group(rows, operations):
            name = groups[group].name if group in groups else ""
            if not any(layout.group == name for layout in layouts):
                continue
            assigned = _assign(operations, own, layouts, name)
            for row in own:
                site = int(operations["site"][row])
                plain = sites.get(site, Site(file="", line=0, function=""))
                label = assigned.get(row) or (_REDUCTION if plain.api in _CALLS_OF_BACKWARD else None)
                if plain.label is None and label is not None:
                    number = new_sites.setdefault((site, label), _free_site(sites, new_sites))
                    sites.setdefault(number, dataclasses.replace(plain, label=label))
                    operations["site"][row] = number


def _free_site(sites: dict[int, Site], new_sites: dict[tuple[int, Label], int]) -> int:
    """Return a number that no site has; those of labels count up from FIRST_LABELLED_SITE, these down from the top."""
    number = 0xFFFFFFFF - len(new_sites)
    while number in sites:
        number -= 1
    return number


def _by_backward(
    operations: Array, spans: Array, ops: Sequence[str]
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the rows of the all_reduces issued within each outermost backward pass, in order."""
    reduces = np.flatnonzero(
        np.isin(operations["op"], [i for i, name in enumerate(ops) if name == _ALL_REDUCE])
        & (operations["kind"] == schema.KIND["collective"])
    )
    passes = spans[np.isin(spans["op"], [i for i, name in enumerate(ops) if name in _BACKWARD])]
    issued = operations["issued_ns"][reduces]
    found, last_end = [], 0
    for begin, end in zip(passes["begin_ns"].tolist(), passes["end_ns"].tolist(), strict=True):
        if begin < last_end:
            continue  # inside another
        last_end = end if end != UNKNOWN_NS else 1 << 62
        rows = reduces[np.searchsorted(issued, begin, "left") : np.searchsorted(issued, last_end, "left")]
        if len(rows):
            found.append(rows)
    return found


def _by_group(rows: np.ndarray[tuple[int], np.dtype[np.int64]], operations: Array) -> list[tuple[int, list[int]]]:
    of_group = operations["group"][rows]
    return [(int(group), rows[of_group == group].tolist()) for group in np.unique(of_group)]


def _assign(operations: Array, rows: Sequence[int], layouts: Sequence[Layout], group: str) -> dict[int, Label]:
    """Return which of the operations on a group in one backward pass are which buckets of its reducers."""
    found: dict[int, Label] = {}
    for reducer in dict.fromkeys(layout.reducer for layout in layouts if layout.group == group):
        left = [row for row in rows if row not in found]
        own = [layout for layout in layouts if layout.reducer == reducer]
        begun = sum(layout.t_ns <= operations["issued_ns"][rows[0]] for layout in own)
        # The newest before the pass first; DDP tells of rebuilt buckets one pass late.
        candidates = [*reversed(own[:begun]), *own[begun:]]
        best: dict[int, Label] = {}
        for layout in candidates:
            fit = _fit(operations, left, layout)
            best = fit if len(fit) > len(best) else best
        found |= best
    return found


def _fit(operations: Array, rows: Sequence[int], layout: Layout) -> dict[int, Label]:
    """Return which operations are which buckets of this layout, taken in turn."""
    found: dict[int, Label] = {}
    index = 0
    for row in rows:
        nbytes = int(operations["nbytes"][row])
        if index < len(layout.sizes) and any(layout.sizes[index] == nbytes * ratio for ratio in _COMPRESSION):
            found[row] = _bucket(index, layout.sizes[index])
            index += 1
        elif operations["dtype"][row] == _INT32 and operations["numel"][row] == layout.num_parameters:
            found[row] = _USED_PARAMETERS
    return found


def _bucket(index: int, nbytes: int) -> Label:
    return Label(api="ddp", text=f"ddp bucket {index}, {nbytes / (1 << 20):.3g} MiB")
