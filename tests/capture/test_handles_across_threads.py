"""Handles may end in any thread, in a forked child, and after their group; each operation is recorded once, done."""

import sys
from collections import Counter

import pytest

from dtprof.records import schema
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs
PROGRAM = jobs.PROGRAMS / "handles_across_threads.py"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> RankTables:
    run = tmp_path_factory.mktemp("job") / "run"
    jobs.recorded(run, [sys.executable, str(PROGRAM)])
    [tables] = open_run(run).load_all()
    assert tables.hook == "native"
    return tables


def test_every_operation_is_there_and_done(tables: RankTables) -> None:
    launched = 600 * (5 + 5 + 1 + 1) + 3 * 3
    assert len(tables.operations) == launched
    assert set(tables.operations["state"].tolist()) == {schema.STATE["done"]}
    assert tables.operations["seq"].tolist() == list(range(launched))


def test_each_has_its_line_though_the_last_way_to_an_operation_is_remembered(tables: RankTables) -> None:
    lines = PROGRAM.read_text().splitlines()
    sites = [tables.sites[int(site)] for site in tables.operations["site"]]
    seen = Counter((lines[site.line - 1].strip(), site.function) for site in sites)
    assert seen == {
        ("return [dist.all_reduce(tensor, async_op=True) for _ in range(count)]", "launch.<locals>.<listcomp>"): 7200,
        ("dist.all_reduce(tensor)", "here"): 3,
        ("dist.broadcast(tensor, 0)", "here"): 3,
        ("dist.all_reduce(tensor)", "<module>"): 3,
    }
