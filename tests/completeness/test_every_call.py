"""Every kind of call is recorded exactly once: counted against gloo's own sequence numbers, call by call."""

from pathlib import Path
from typing import Any

import pytest

from dtprof.records import schema
from tests.completeness import coverage
from tests.completeness.comparison import differences
from tests.completeness.recordings import Observation, record_calls

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module", params=["native", "python"])
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Observation]:
    """Make every call under each tap; return the records and gloo's own counts by rank."""
    options = [] if request.param == "native" else ["--no-native"]
    return record_calls(tmp_path_factory.mktemp(request.param), *options)


def test_every_call_is_recorded_exactly_once(observed: list[Observation]) -> None:
    for one in observed:
        assert (one.tables.problems, one.tables.errors, one.tables.notes) == ((), 0, ())
        assert differences(one.tables, one.measurements, one.whole) == []


def test_what_is_recorded_of_calls_is_what_the_page_says(observed: list[Observation]) -> None:
    seen = coverage.rows_of(observed)
    assert seen == coverage.rows_for(coverage.read()["calls"], 2)
    assert len(seen) >= 95


def test_every_operation_is_seen_to_complete_or_to_fail(observed: list[Observation]) -> None:
    for one in observed:
        tables, measurements = one.tables, one.measurements
        unfinished = tables.operations[tables.operations["state"] < schema.STATE["done"]]
        if tables.tap == "python":  # says that it cannot know for these
            unfinished = unfinished[(unfinished["flags"] & schema.FLAG["completion"]) != 0]
        assert [tables.raw_ops[row["op"]] for row in unfinished] == []
        failed = tables.operations[tables.operations["state"] == schema.STATE["failed"]]
        refused = [made for made in measurements if made.refused is not None]
        assert len(failed) == sum(len(made.rows(tables)) for made in refused) > 5


def test_fields_that_must_agree_are_recorded(observed: list[Observation]) -> None:
    tables = observed[0].tables
    by_name = {made.name: made for made in observed[0].measurements}

    def first(name: str) -> Any:
        return by_name[name].rows(tables)[0]

    maximum = first("all_reduce max")
    assert (maximum["reduce_op"], maximum["dtype"], maximum["nbytes"]) == (4, 3, 16)  # MAX, int32, 4 elements
    assert first("broadcast sync")["peer"] == 0
    sent = first("isend/irecv")
    assert (tables.ops[sent["op"]], sent["peer"], sent["tag"], sent["numel"]) == ("send", 1, 5, 4)
    assert tables.sizes[int(first("all_to_all_single splits async")["tag"])] == ((1, 3), (1, 3))
    assert first("all_to_all_single splits of rows")["numel"] == 12  # 4 rows of 3, of which 1 and 3 go to each rank
    assert first("all_reduce async")["flags"] & schema.FLAG["async"]
    assert first("barrier sync")["numel"] == 0
    group = tables.groups[int(first("new_group")["group"])]
    assert (group.description, group.ranks, group.backend) == ("pair", (0, 1), "gloo")
    site = tables.sites[int(first("all_gather_object")["site"])]
    assert Path(site.file).name == "every_call.py"
    assert site.api == "all_gather_object"


def test_sequence_numbers_have_no_gap_and_agree_across_ranks(observed: list[Observation]) -> None:
    columns = []
    for tables in (one.tables for one in observed):
        rows = tables.operations[tables.operations["kind"] == schema.KIND["collective"]]
        world = rows[[tables.groups[int(group)].name == "0" for group in rows["group"]]]
        assert world["seq"].tolist() == list(range(len(world)))
        columns.append([tables.ops[row["op"]] for row in world])
    assert columns[0] == columns[1]
