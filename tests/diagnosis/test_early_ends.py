"""Ranks that end before they open a log, told by what their processes said of themselves and by their exits."""

import json
from pathlib import Path

import pytest

from dtprof import events
from dtprof.cli.inspection import diagnose_run
from dtprof.run_format import paths
from dtprof.tables import ProcessExit
from tests.builders import START_NS, RankBuilder, write_run

PID = 777


@pytest.mark.parametrize(
    ("status", "kind", "missing"),
    [
        (-9, "rank-killed", ()),
        (3, "rank-crashed", ()),
        (-15, "rank-never-joined", (1,)),
        (0, "rank-never-joined", (1,)),
    ],
)
def test_a_rank_that_fails_before_it_joins_is_named_with_its_end(
    tmp_path: Path, status: int, kind: str, missing: tuple[int, ...]
) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in (0, 2)]
    for rank in ranks:
        rank.span(events.INIT, 0, site=rank.site(line=5))
    others = [ProcessExit(pid=rank.pid, status=-15, t_ns=START_NS + 60 * 10**9) for rank in ranks]
    run = write_run(tmp_path / "run", ranks, exit_status=1, exits=others)
    node = run / paths.node_folder_name(ranks[0].host)
    rows = [{"pid": PID, "env_rank": "1", "host": "host-a"}, {"pid": PID + 1, "env_rank": None}]
    (node / paths.PROCESSES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (node / paths.EXITS).open("a") as file:
        file.write(json.dumps({"pid": PID, "status": status, "t_ns": START_NS + 10}) + "\n")
    verdict = diagnose_run(run)
    (finding,) = verdict.findings
    assert (finding.kind, finding.culprit_ranks, verdict.ranks_missing) == (kind, (1,), missing)
