"""What the rules get of a rank, from its tables."""

from dataclasses import replace

import numpy as np

from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.records import schema
from dtprof.records.codes import DTYPES, REDUCE_OPS
from tests.diagnosis.judging import ranks_in_step


def test_names_of_codes_are_those_of_the_format() -> None:
    assert tuple(name for name, _ in schema.DTYPES) == DTYPES
    assert schema.REDUCE_OPS == REDUCE_OPS


def test_only_the_newest_operations_are_kept_one_by_one() -> None:
    ranks = ranks_in_step(2, 2)
    tables = replace(ranks[0].tables(), world_size=1_000_000)
    assert len(rank_state(tables, exit=None, stack=None, alive=None).operations) == 4
    many = np.repeat(tables.operations, 100)
    kept = rank_state(replace(tables, operations=many), exit=None, stack=None, alive=None)
    assert len(kept.operations) == 256
