"""Recognise messages by which ranks exchange parameters, as in decentralised training; no pipeline sends them.

Of the messages of two ranks in a step, those of each direction carry as many values as the optimizers step, or a
multiple, in floating point and outside of all that lies between the first and the last pass of the step: a stage
sends what its forward pass gives before its backward pass.
"""

import numpy as np

from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.columns import is_any, number_alike
from dtprof.intervals import Mask, locate
from dtprof.job.valid_records import spans_of_any
from dtprof.records import codes, events
from dtprof.records.tables import Array, RankTables

_PASSES = (events.FORWARD, events.EVALUATION, events.BACKWARD)


def find_parameter_messages(tables: RankTables, operations: Array, steps: RankSteps) -> Mask:
    """Say which operations of a rank, within its steps, are messages by which it exchanges parameters with another.

    With that rank it must exchange nothing else within steps.
    """
    found = np.zeros(len(operations), np.bool_)
    elements = sum(age.elements for age in tables.optimizer_ages)
    at = np.flatnonzero(operations["kind"] == codes.POINT_TO_POINT)
    if not elements or not len(at):
        return found
    step = locate(operations["issued_ns"][at], steps.windows)
    at, step = at[step >= 0], step[step >= 0]
    spans = spans_of_any(tables.spans, tables, _PASSES, (codes.DONE,))
    if not len(at) or not len(spans):
        return found
    rows = operations[at]
    # From the first to the last pass of each step, one after the other: of a step without passes nothing is known.
    of_pass = locate(spans["begin_ns"], steps.windows)
    within = of_pass >= 0
    first = np.full(len(steps.windows), np.iinfo(np.int64).max)
    last = np.full(len(steps.windows), np.iinfo(np.int64).min)
    np.minimum.at(first, of_pass[within], spans["begin_ns"][within])
    np.maximum.at(last, of_pass[within], spans["end_ns"][within])
    issued = rows["issued_ns"]
    fits = (first[step] < last[step]) & ((issued < first[step]) | (issued >= last[step]))
    fits &= is_any(rows["dtype"], codes.FLOATS)
    number, _ = number_alike(rows["group"], rows["peer"], rows["op"], step)
    values = np.zeros(int(number.max()) + 1, np.int64)
    np.add.at(values, number, rows["numel"].astype(np.int64))
    fits &= (values[number] > 0) & (values[number] % elements == 0)
    peer, _ = number_alike(rows["group"], rows["peer"])
    found[at] = np.bincount(peer, ~fits)[peer] == 0
    return found
