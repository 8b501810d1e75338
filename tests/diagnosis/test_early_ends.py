"""Ranks that end before they open a log, told by what their processes said of themselves and by their exits."""

import json
from pathlib import Path

import pytest

from dtprof.records import events, paths
from dtprof.records.tables import ProcessExit
from dtprof.session.run_diagnosis import diagnose_run
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


def stacks(cpu_share: float, state: str, *, ranks: dict[int, object]) -> str:
    """Return the stacks of processes, one a rank, that stand in the same line."""
    frame = {"name": "load", "filename": "/job/train.py", "line": 12}
    processes = {
        str(PID + at): {
            "state": state,
            "cpu_share": cpu_share,
            "threads": [{"thread_name": "MainThread", "frames": [frame]}],
            "rank": rank,
        }
        for at, rank in ranks.items()
    }
    return json.dumps({"t_ns": START_NS, "processes": processes})


@pytest.mark.parametrize(
    ("cpu_share", "state", "words", "early"),
    [
        (0.9, "running", "is busy at /job/train.py:12 (load)", True),
        (0.0, "sleeping", "is blocked at /job/train.py:12 (load)", False),
        (0.0, "disk-sleep", "is frozen (process state disk-sleep) at /job/train.py:12 (load)", True),
        (0.0, "stopped", "is frozen (process state stopped) at /job/train.py:12 (load)", False),
    ],
)
def test_a_rank_that_was_seen_elsewhere_before_it_joins_is_reported_with_its_line(
    tmp_path: Path, cpu_share: float, state: str, words: str, early: bool
) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in (0, 2)]
    for rank in ranks:
        rank.span(events.INIT, 0, site=rank.site(line=5))
    run = write_run(tmp_path / "run", ranks, exit_status=1)
    node = run / paths.node_folder_name(ranks[0].host)
    (node / paths.STACKS).write_text(stacks(cpu_share, state, ranks={0: 1, 1: 0, 2: 7, 3: "1", 4: True}))
    (finding,) = diagnose_run(run).findings
    assert finding.kind == "rank-never-joined"
    assert finding.summary == (
        f"Rank 1 of 3 started and did not join: it {words}; ranks 0, 2 wait in init_process_group."
    )
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((1,), (0, 2))
    assert {rank: site.line for rank, site in finding.culprit_call_sites.items()} == {1: 12}
    assert finding.is_early is early


def test_of_ranks_without_a_record_those_that_were_seen_are_distinguished(tmp_path: Path) -> None:
    rank = RankBuilder(0, 3, closed=False)
    rank.span(events.INIT, 0, site=rank.site(line=5))
    run = write_run(tmp_path / "run", [rank], exit_status=1)
    (run / paths.node_folder_name(rank.host) / paths.STACKS).write_text(stacks(0.9, "running", ranks={0: 1}))
    (finding,) = diagnose_run(run).findings
    assert finding.summary == "Ranks 1, 2 of 3 never joined; rank 0 waits in init_process_group."
    assert finding.evidence[0].startswith(f"rank 1 (process {PID}): process state running, 90 % of a core")
    assert finding.evidence[1:] == ("rank 2 left no record at all",)
    assert finding.is_early is False
