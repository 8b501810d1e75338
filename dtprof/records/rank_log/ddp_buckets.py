"""Identify the buckets of DistributedDataParallel: its reducer issues all_reduces without a Python frame.

Within a backward pass a reducer reduces its buckets in order. An unlabelled all_reduce on its group with the size of
the next bucket is that bucket; a communication hook may send half the bytes. Where parameters may be unused, ranks also
reduce a map of the used ones, a number each. Any other unlabelled all_reduce issued by the backward call belongs to DDP
as well: sparse gradients, callbacks of a hook.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Sized

import numpy as np

from dtprof.columns import distinct
from dtprof.records import events, schema
from dtprof.records.sites import Label, Site
from dtprof.records.tables import UNKNOWN_NS, Array, BucketLayout, Group

COMPRESSION = (1, 2)
"""Bytes of a bucket over those that are reduced: hooks of DDP send halves of it in fp16 or bf16."""
_ALL_REDUCE = "all_reduce"
_INT32 = [name for name, _ in schema.DTYPES].index("int32")
_REDUCTION = Label(api="ddp", text="ddp reduction of gradients")
_CALLS_OF_BACKWARD = ("Tensor.backward", "backward")
_USED_PARAMETERS = Label(api="ddp", text="ddp map of used parameters")
_BACKWARD = (events.BACKWARD, *events.PIPELINE_BACKWARD)


def label_buckets(
    operations: Array,
    spans: Array,
    *,
    ops: Sequence[str],
    groups: dict[int, Group],
    sites: dict[int, Site],
    layouts: Sequence[BucketLayout],
) -> None:
    """Assign labelled sites to the all_reduces of buckets; new sites are added to `sites`."""
    if not layouts or not len(operations):
        return
    new_sites: dict[tuple[int, Label], int] = {}
    for rows in _by_backward(operations, spans, ops):
        for group, group_rows in _by_group(rows, operations):
            name = groups[group].name if group in groups else ""
            if not any(layout.group == name for layout in layouts):
                continue
            assigned = _assign(operations, group_rows, layouts, name)
            for row in group_rows:
                site = int(operations["site"][row])
                plain = sites.get(site, Site(file="", line=0, function=""))
                label = assigned.get(row) or (_REDUCTION if plain.api in _CALLS_OF_BACKWARD else None)
                if plain.label is None and label is not None:
                    number = new_sites.setdefault((site, label), free_site(sites, new_sites))
                    sites.setdefault(number, dataclasses.replace(plain, label=label))
                    operations["site"][row] = number


def free_site(sites: Mapping[int, Site], new_sites: Sized) -> int:
    """Return an unused site id: recorded ones count up from FIRST_LABELLED_SITE, these down from the top."""
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
    rows_of_passes, last_end = [], 0
    for begin, end in zip(passes["begin_ns"].tolist(), passes["end_ns"].tolist(), strict=True):
        if begin < last_end:
            continue  # nested in another
        last_end = end if end != UNKNOWN_NS else 1 << 62
        rows = reduces[np.searchsorted(issued, begin, "left") : np.searchsorted(issued, last_end, "left")]
        if len(rows):
            rows_of_passes.append(rows)
    return rows_of_passes


def _by_group(rows: np.ndarray[tuple[int], np.dtype[np.int64]], operations: Array) -> list[tuple[int, list[int]]]:
    of_group = operations["group"][rows]
    return [(int(group), rows[of_group == group].tolist()) for group in distinct(of_group)]


def _assign(operations: Array, rows: Sequence[int], layouts: Sequence[BucketLayout], group: str) -> dict[int, Label]:
    """Return labels by row of the operations on a group in a backward pass that are buckets of its reducers."""
    labels: dict[int, Label] = {}
    for reducer in dict.fromkeys(layout.reducer for layout in layouts if layout.group == group):
        left = [row for row in rows if row not in labels]
        of_reducer = [layout for layout in layouts if layout.reducer == reducer]
        num_before = sum(layout.t_ns <= operations["issued_ns"][rows[0]] for layout in of_reducer)
        # The newest layout before the pass first; DDP reports rebuilt buckets one pass late.
        candidates = [*reversed(of_reducer[:num_before]), *of_reducer[num_before:]]
        best: dict[int, Label] = {}
        for layout in candidates:
            fit = _fit(operations, left, layout)
            best = fit if len(fit) > len(best) else best
        labels |= best
    return labels


def _fit(operations: Array, rows: Sequence[int], layout: BucketLayout) -> dict[int, Label]:
    """Return labels by row of the operations that match the buckets of a layout, in order."""
    labels: dict[int, Label] = {}
    index = 0
    for row in rows:
        nbytes = int(operations["nbytes"][row])
        if index < len(layout.sizes) and any(layout.sizes[index] == nbytes * ratio for ratio in COMPRESSION):
            labels[row] = _bucket(index, layout.sizes[index])
            index += 1
        elif operations["dtype"][row] == _INT32 and operations["numel"][row] == layout.num_parameters:
            labels[row] = _USED_PARAMETERS
    return labels


def _bucket(index: int, nbytes: int) -> Label:
    return Label(api="ddp", text=f"ddp bucket {index}, {nbytes / (1 << 20):.3g} MiB")
