"""Every kind of call is recorded exactly once: counted against gloo's own sequence numbers, call by call."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dtprof.records import schema
from dtprof.records.tables import RankTables
from tests.completeness import coverage
from tests.completeness.comparison import differences
from tests.completeness.recordings import Observation, record_calls

pytestmark = pytest.mark.jobs
HOOKS = ("native", "python")
SAME_FLAGS = schema.FLAG["async"] | schema.FLAG["device"] | schema.FLAG["no_work"] | schema.FLAG["inferred_site"]


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Observation]]:
    """Make every call under a hook, once; return the records and gloo's own counts by rank."""

    @cache
    def observe(hook: str) -> list[Observation]:
        return record_calls(tmp_path_factory.mktemp(hook), *([] if hook == "native" else ["--no-native"]))

    return observe


@pytest.fixture(scope="module", params=HOOKS)
def observed(request: pytest.FixtureRequest, observe: Callable[[str], list[Observation]]) -> list[Observation]:
    """Give what was recorded and counted under each hook."""
    return observe(request.param)


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
        if tables.hook == "python":  # says that it cannot know for these
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


def sizes_of(tables: RankTables, tag: int) -> list[tuple[int, ...]]:
    """Return the sizes of an uneven operation."""
    return list(tables.sizes.get(tag, ()))


def describe(tables: RankTables) -> list[dict[str, Any]]:
    """Return what must not depend on the hook, of every operation, in the order of its group."""
    rows = []
    for row in tables.operations:
        group = tables.groups[int(row["group"])]
        site = tables.sites.get(int(row["site"]))
        tag = int(row["tag"])
        rows.append(
            {
                "group": (group.name, group.description, group.ranks, group.backend),
                "kind": int(row["kind"]),
                "seq": int(row["seq"]),
                "op": tables.raw_ops[row["op"]],
                "numel": int(row["numel"]),
                "dtype": int(row["dtype"]),
                "reduce_op": int(row["reduce_op"]),
                "peer": int(row["peer"]),
                "sizes or tag": sizes_of(tables, tag) if row["kind"] == schema.KIND["collective"] else tag,
                "site": site and (Path(site.file).name, site.line, site.function, site.api),
                "flags": int(row["flags"]) & SAME_FLAGS,
                "step": int(row["step"]),
                "failed": bool(row["state"] == schema.STATE["failed"]),
            }
        )
    return sorted(rows, key=lambda one: (one["group"], one["kind"], one["seq"]))


def test_both_hooks_write_the_same_records_for_every_call(observe: Callable[[str], list[Observation]]) -> None:
    described: dict[str, list[list[dict[str, Any]]]] = {}
    for hook in HOOKS:
        ranks = [one.tables for one in observe(hook)]
        assert [tables.hook for tables in ranks] == [hook, hook]
        described[hook] = [describe(tables) for tables in ranks]
        phases = [[tables.ops[row["op"]] for row in tables.spans] for tables in ranks]
        assert phases[0].count("backward") == 11  # 8 differentiable collectives, DDP twice, FSDP2
    for native, python in zip(described["native"], described["python"], strict=True):
        assert len(native) > 140
        differing = [(one, other) for one, other in zip(native, python, strict=True) if one != other]
        assert differing == []
