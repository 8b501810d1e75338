"""Every operation is recorded exactly once: counted against gloo's own sequence numbers, call by call."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtprof.run_format import schema
from dtprof.run_format.reader import open_run
from dtprof.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs

# gloo counts more than one operation for these, because it builds them from others below the dispatcher.
GLOO_COUNTS_MORE = {
    "reduce_scatter sync",
    "reduce_scatter async",
    "reduce_scatter_tensor sync",
    "reduce_scatter_tensor async",
    "reduce_scatter_single sync",
    "reduce_scatter_single async",
    "functional reduce_scatter",
    "monitored_barrier",
    "fsdp2 step",
}
# gloo refuses these before it counts them; the record says that they failed.
GLOO_REFUSES = {"all_gather uneven sync", "all_gather uneven async"}
REFUSED = {"0": 1}


@pytest.fixture(scope="module", params=["native", "python"])
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Run every call once under each tap; return the run and gloo's own counts by rank."""
    folder = tmp_path_factory.mktemp(request.param)
    run = folder / "run"
    options = [] if request.param == "native" else ["--no-native"]
    jobs.recorded(run, jobs.torchrun(2, jobs.PROGRAMS / "every_call.py", str(folder)), *options)
    return run, [json.loads((folder / f"oracle-{rank}.json").read_text()) for rank in (0, 1)]


def count_operations(tables: RankTables, begin: int, end: int) -> dict[str, int]:
    """Return how many operations were issued in this time, by group name."""
    rows = tables.operations
    chosen = rows[(rows["issued_ns"] >= begin) & (rows["issued_ns"] <= end)]
    names = [tables.groups[int(group)].name for group in chosen["group"]]
    return {name: names.count(name) for name in set(names)}


def test_every_call_is_recorded_exactly_once(observed: tuple[Path, list[Any]]) -> None:
    run, oracle = observed
    differing = []
    for rank, calls in enumerate(oracle):
        tables = open_run(run).load(rank)
        assert tables.problems == ()
        assert tables.errors == 0
        for made in calls:
            seen = count_operations(tables, made["from_ns"], made["to_ns"])
            expected = REFUSED if made["name"] in GLOO_REFUSES else made["gloo"]
            same = set(seen) == set(expected) if made["name"] in GLOO_COUNTS_MORE else seen == expected
            if not same or (made["error"] is not None) != (made["name"] in GLOO_REFUSES):
                differing.append((rank, seen, made))
    assert differing == []
    assert sum(map(len, oracle)) >= 120


def test_every_operation_is_seen_to_complete_or_to_fail(observed: tuple[Path, list[Any]]) -> None:
    run, oracle = observed
    refused = [made for made in oracle[0] if made["name"] in GLOO_REFUSES]
    for tables in open_run(run).load_all():
        unfinished = tables.operations[tables.operations["state"] < 3]
        if tables.tap == "python":  # says that it cannot know for these
            unfinished = unfinished[(unfinished["flags"] & schema.FLAG["completion"]) != 0]
        assert [tables.raw_ops[row["op"]] for row in unfinished] == []
        failed = tables.operations[tables.operations["state"] == 4]
        assert len(failed) == len(refused)


def test_fields_that_must_agree_are_recorded(observed: tuple[Path, list[Any]]) -> None:
    run, oracle = observed
    tables = open_run(run).load(0)
    by_name = {made["name"]: made for made in oracle[0]}

    def first(name: str) -> Any:
        made = by_name[name]
        rows = tables.operations
        return rows[(rows["issued_ns"] >= made["from_ns"]) & (rows["issued_ns"] <= made["to_ns"])][0]

    maximum = first("all_reduce max")
    assert (maximum["reduce_op"], maximum["dtype"], maximum["nbytes"]) == (4, 3, 16)  # MAX, int32, 4 elements
    assert first("broadcast sync")["peer"] == 0
    sent = first("isend/irecv")
    assert (tables.ops[sent["op"]], sent["peer"], sent["tag"], sent["numel"]) == ("send", 1, 5, 4)
    assert tables.sizes[int(first("all_to_all_single splits async")["tag"])] == ((1, 3), (1, 3))
    assert first("all_reduce async")["flags"] & 1
    assert first("barrier sync")["numel"] == 0
    group = tables.groups[int(first("new_group")["group"])]
    assert (group.description, group.ranks, group.backend) == ("pair", (0, 1), "gloo")
    site = tables.sites[int(first("all_gather_object")["site"])]
    assert Path(site.file).name == "every_call.py"
    assert site.api == "all_gather_object"


def test_sequence_numbers_have_no_gap_and_agree_across_ranks(observed: tuple[Path, list[Any]]) -> None:
    run, _ = observed
    columns = []
    for tables in open_run(run).load_all():
        rows = tables.operations[tables.operations["kind"] == 1]
        world = rows[[tables.groups[int(group)].name == "0" for group in rows["group"]]]
        assert world["seq"].tolist() == list(range(len(world)))
        columns.append([tables.ops[row["op"]] for row in world])
    assert columns[0] == columns[1]
