"""Whatever a framework does across ranks is recorded exactly once: counted against gloo, scenario by scenario."""

from pathlib import Path

import pytest

from dtprof.records import schema
from tests.completeness import coverage, recordings
from tests.completeness.comparison import differences
from tests.completeness.recordings import Observation

pytestmark = pytest.mark.jobs
HOOKS = {"native": (), "python": ("--no-native",)}
FAKE = {"allreduce_", "allgather_"}  # of the fake process group: nothing is carried out
UNOBSERVED = {"native": FAKE, "python": FAKE | {"reduce_scatter_tensor_coalesced_"}}
"""Operators of which each hook may leave open whether they have completed."""


def check(ranks: list[Observation], hook: str) -> None:
    """Compare every rank with gloo's counts, and what is recorded with what the page says."""
    for rank in ranks:
        assert (rank.tables.hook, rank.tables.problems, rank.tables.errors) == (hook, (), 0)
        assert rank.tables.notes == ()
        assert differences(rank.tables, rank.measurements, rank.whole) == []
        rows = rank.tables.operations
        observed = rows[(rows["flags"] & schema.FLAG["completion"]) != 0]
        assert [rank.tables.raw_ops[row["op"]] for row in observed if row["state"] < schema.STATE["done"]] == []
        unobserved = {rank.tables.raw_ops[row["op"]] for row in rows if not row["flags"] & schema.FLAG["completion"]}
        assert unobserved <= UNOBSERVED[hook]
    on_page = {row["name"]: row for row in coverage.rows_for(coverage.read()["scenarios"], len(ranks))}
    for row in coverage.rows_of(ranks):
        assert row == on_page[row["name"]]


@pytest.mark.parametrize(
    ("hook", "num_ranks"),
    [
        ("native", 2),
        pytest.param("native", 4, marks=pytest.mark.thorough),
        pytest.param("python", 2, marks=pytest.mark.thorough),
        pytest.param("python", 4, marks=pytest.mark.thorough),
    ],
)
def test_every_scenario_is_recorded_exactly_once(tmp_path: Path, num_ranks: int, hook: str) -> None:
    ranks = recordings.record_scenarios(tmp_path, num_ranks, *HOOKS[hook])
    check(ranks, hook)
    on_page = coverage.rows_for(coverage.read()["scenarios"], num_ranks)
    names = {row["name"] for row in on_page if row["section"] != coverage.PROCESSES}
    assert {measurement.name for measurement in ranks[0].measurements} == names


@pytest.mark.parametrize(
    ("way", "hook"),
    [
        ("fork", "native"),
        *(pytest.param(way, "native", marks=pytest.mark.thorough) for way in recordings.WAYS if way != "fork"),
        pytest.param("fork", "python", marks=pytest.mark.thorough),
    ],
)
def test_every_way_to_start_a_process_is_recorded_exactly_once(tmp_path: Path, way: str, hook: str) -> None:
    for attempt in recordings.record_workers(tmp_path, way, *HOOKS[hook]):
        check(attempt, hook)
