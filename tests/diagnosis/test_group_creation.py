"""Jobs in which every rank is inside new_group, and no operation is open: that holds a job up as well."""

from pathlib import Path

from dtprof.records import events
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import RankBuilder, write_run

MS = 1_000_000


def job(lines: list[list[int]]) -> list[RankBuilder]:
    """Return ranks that call new_group at these lines, and do not come out of the last call."""
    ranks = []
    for rank, calls in enumerate(lines):
        own = RankBuilder(rank, world_size=len(lines), closed=False)
        own.boot_id = "another boot"
        own.op("barrier", 0, MS)
        for at, line in enumerate(calls):
            is_last = at == len(calls) - 1
            begin = (2 + at) * MS
            own.span(
                events.NEW_GROUP, begin, None if is_last else begin + MS // 2, site=own.site("new_group", line=line)
            )
        ranks.append(own)
    return ranks


def running(path: Path) -> Path:
    """Let the run be one of which nobody saw the end."""
    manifest = path / "run.json"
    manifest.write_text(
        '{"format_version": 1, "command": ["torchrun"], "started_realtime_ns": 1, "ended_realtime_ns": 0}'
    )
    return path


def test_groups_made_in_two_orders_hang_in_new_group_alone(tmp_path: Path) -> None:
    verdict = diagnose_run(running(write_run(tmp_path / "run", job([[97, 98], [94, 95], [97]]))))
    assert verdict.outcome == "hang"
    (finding,) = verdict.findings
    assert (finding.kind, finding.culprit_ranks) == ("group-creation-mismatch", (1,))
    assert {rank: site.line for rank, site in finding.culprit_call_sites.items()} == {1: 94}


def test_ranks_that_all_make_the_same_group_are_not_accused(tmp_path: Path) -> None:
    verdict = diagnose_run(running(write_run(tmp_path / "run", job([[97], [97], [97]]))))
    assert verdict.findings == ()
    assert verdict.outcome == "unknown"
