"""A call site names the lines of the user's code that led there."""

from pathlib import Path

import pytest

from dtprof.records import schema
from tests import jobs

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_calls_of_one_line_are_told_apart_by_their_callers(tmp_path: Path, native: bool) -> None:
    tables = jobs.recorded_alone("called_from.py", tmp_path, native=native)
    numbers = tables.operations["site"].tolist()
    assert numbers[:2] == numbers[2:4]
    train, evaluate, *_, deep = (tables.sites[number] for number in numbers)
    assert train == evaluate == deep
    assert (train.function, train.api) == ("average", "all_reduce")
    assert [caller.function for caller in train.callers] == ["train", "main", "<module>"]
    in_lambda, within, *others = (caller.function.rpartition(".")[2] for caller in evaluate.callers)
    assert (in_lambda, within, others) == ("<lambda>", "evaluate", ["main", "<module>"])
    assert train.callers[1].line == evaluate.callers[2].line - 1
    assert [caller.function for caller in deep.callers] == ["descend"] * schema.MOST_CALLERS
