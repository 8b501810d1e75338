"""The comparison with gloo's counts can fail: an operation missed, doubled, in another group, or between scenarios."""

import pytest

from dtprof.records.tables import RankTables
from tests.builders import START_NS, RankBuilder
from tests.completeness.comparison import Measurement, differences
from tests.completeness.programs.names import WHOLE


def recorded(*names: str, state: str = "done") -> RankTables:
    """Return the tables of rank 0 of 4 with these operations of the default group, issued at 10, 20, 30, ..."""
    rank = RankBuilder(0, world_size=4)
    for i, name in enumerate(names, start=1):
        rank.op(name, 10 * i, 10 * i + 5, state=state)
    return rank.tables()


def measured(name: str, begin: int, end: int, gloo: int, error: str = "", refused: str | None = None) -> Measurement:
    counts = {"0": gloo} if gloo else {}
    times = {"from_ns": START_NS + begin, "to_ns": START_NS + end}
    return Measurement(section="", name=name, gloo=counts, error=error, refused=refused, **times)


def compare(tables: RankTables, one: Measurement, altogether: int) -> int:
    """Return how many differences there are."""
    return len(differences(tables, [one], measured(WHOLE, 0, 1000, altogether)))


def test_equal_counts_are_no_difference() -> None:
    assert compare(recorded("all_reduce", "broadcast", "barrier"), measured("two", 5, 25, 2), 3) == 0


@pytest.mark.parametrize("gloo", [1, 3])
def test_missed_and_doubled_operations_are_differences(gloo: int) -> None:
    assert compare(recorded("all_reduce", "broadcast"), measured("two", 5, 25, gloo), gloo) == 1


def test_operation_of_another_group_is_a_difference() -> None:
    tables = recorded("all_reduce")
    other = Measurement(section="", name="other", from_ns=START_NS, to_ns=START_NS + 50, gloo={"1": 1})
    assert len(differences(tables, [other], Measurement(**vars(other) | {"name": WHOLE}))) == 1


def test_operation_between_the_scenarios_is_a_difference() -> None:
    assert compare(recorded("all_reduce", "broadcast"), measured("first", 5, 15, 1), 1) == 1
    assert compare(recorded("all_reduce"), measured("first", 5, 15, 1), 2) == 1


def test_list_reduce_scatter_counts_once_for_each_rank() -> None:
    assert compare(recorded("reduce_scatter"), measured("list", 5, 15, 4), 4) == 0
    assert compare(recorded("reduce_scatter"), measured("list", 5, 15, 1), 1) == 1


def test_refusal_must_be_the_one_that_is_expected() -> None:
    failed = recorded("all_reduce", state="failed")
    assert compare(failed, measured("bad", 5, 15, 0, "RuntimeError: too long", "too long"), 0) == 0
    assert compare(failed, measured("bad", 5, 15, 1, "RuntimeError: too long", "too long"), 1) == 0
    assert compare(failed, measured("bad", 5, 15, 0, "RuntimeError: too long", "too short"), 0) == 1
    assert compare(failed, measured("good", 5, 15, 0), 0) == 1
    assert compare(recorded("all_reduce"), measured("bad", 5, 15, 1, "", "too long"), 1) == 1
