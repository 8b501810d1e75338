"""Ranks are read by workers, or in this process: the verdict is the same."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.sources import recorded_ranks
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records import paths, reader
from dtprof.records.rank_log import counted_segments, segments
from dtprof.records.reader import open_run
from dtprof.records.tables import ProcessExit
from dtprof.session.engines import Engine
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import START_NS, RankBuilder, write_run
from tests.synthetic import Job, Spell, generate

STEPS = 40


def hung_job(*, attempt: int = 0) -> list[RankBuilder]:
    """Return four ranks; in the last step rank 2 goes past the first of two calls, which the others wait in."""
    ranks = []
    for rank in range(4):
        own = RankBuilder(rank, world_size=4, attempt=attempt, closed=False)
        own.pid = 1000 * attempt + rank + 10
        first, second = (own.site("all_reduce", line=line) for line in (7, 9))
        for step in range(STEPS):
            own.op("all_reduce", 20 * step, 20 * step + 5, step=step, site=first, nbytes=8)
            own.op("all_reduce", 20 * step + 10, 20 * step + 15, step=step, site=second, nbytes=16)
        if rank == 2:
            own.op("all_reduce", 20 * STEPS, step=STEPS, site=second, nbytes=16)
        else:
            own.op("all_reduce", 20 * STEPS, step=STEPS, site=first, nbytes=8)
        ranks.append(own)
    return ranks


def verdicts(run: Path) -> tuple[Verdict, Verdict]:
    """Return the verdict by this process alone and by two workers."""
    return diagnose_run(run, Engine(jobs=1)), diagnose_run(run, Engine(jobs=2))


def test_workers_and_one_process_come_to_the_same_verdict(tmp_path: Path) -> None:
    alone, shared = verdicts(write_run(tmp_path / "run", hung_job(), exit_status=1))
    assert alone == shared
    assert (alone.findings[0].kind, alone.findings[0].culprit_ranks) == ("rank-skipped-collective", (2,))


def test_workers_read_the_attempts_before_the_last_too(tmp_path: Path) -> None:
    ranks = [*hung_job(), *hung_job(attempt=1)]
    exits = [ProcessExit(pid=rank.pid, status=-15, t_ns=START_NS + 60 * 10**9) for rank in ranks]
    alone, shared = verdicts(write_run(tmp_path / "run", ranks, exit_status=1, exits=exits))
    assert alone == shared
    assert alone.findings[0].evidence[0].startswith("the same in both attempts: ")


def test_of_a_long_run_only_the_newest_operations_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (
        ("MAX_COLLECTIVES", 4),
        ("MIN_COLLECTIVES", 6),
        ("MAX_TAIL", 6),
        ("MIN_TAIL", 6),
        ("MAX_OPERATIONS", 24),
    ):
        monkeypatch.setattr(recorded_ranks, name, limit)
    run = open_run(write_run(tmp_path / "run", hung_job(), exit_status=1))
    (own, *_) = (rank.evidence for rank in recorded_ranks.read_ranks(run, [0], THIS_PROCESS))
    (table,) = own.collectives.groups.values()
    assert table["seq"].tolist() == list(range(2 * STEPS - 5, 2 * STEPS + 1)), "6 of the 81"
    assert [operation.seq for operation in own.operations] == table["seq"].tolist()
    assert own.collectives.operation(int(table["row"][-1])) == own.operations[-1]
    assert own.counts == {(next(iter(own.groups)), False): 2 * STEPS + 1}, "all are counted"
    held = len(pickle.dumps(own))
    monkeypatch.setattr(recorded_ranks, "MAX_TAIL", 200)
    monkeypatch.setattr(recorded_ranks, "MIN_COLLECTIVES", 200)
    (whole, *_) = (rank.evidence for rank in recorded_ranks.read_ranks(run, [0], THIS_PROCESS))
    assert len(pickle.dumps(whole)) > held + (81 - 6) * 120, "a row has more than 120 bytes"


def test_a_long_log_is_read_once_for_what_the_rules_look_at_and_for_stragglers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_ranks, "MAX_COLLECTIVES", 400)
    monkeypatch.setattr(recorded_ranks, "MIN_COLLECTIVES", 100)
    monkeypatch.setattr(reader, "MIN_OF_EACH", 100)
    generate(tmp_path / "run", Job(dp=4, steps=120, layers=4, slow={1: 1.5}))
    read: list[str] = []

    def read_segment(path: Path, taker: segments.Taker, problems: list[str]) -> dict[str, Any] | None:
        read.append(path.parent.name)
        return segments.read_segment(path, taker, problems)

    monkeypatch.setattr(counted_segments, "read_segment", read_segment)
    alone = diagnose_run(tmp_path / "run", Engine(jobs=1))
    assert [finding.culprit_ranks for finding in alone.findings] == [(1,)]
    assert sorted(read) == [paths.rank_folder_name(rank, 0) for rank in range(4)]
    monkeypatch.setattr(reader, "MOST_BYTES", 0)
    assert diagnose_run(tmp_path / "run", Engine(jobs=1)) == alone


@pytest.mark.parametrize(
    ("factor", "num_slow", "is_running", "culprits"),
    # Steps take 240 ms, slow ones 1,440 ms. 30 of those cost a tenth of the run; 3 are a moment of 4 s, a sixth of the
    # last 26 s. 70 of 336 ms cost 7 s: too little of the longer parts, and enough of the last 26 s.
    [(6.0, 30, True, [(1,)]), (6.0, 3, True, []), (6.0, 30, False, []), (1.4, 70, True, [(1,)])],
)
def test_a_rank_that_has_become_slow_late_in_a_long_running_job_is_found(
    tmp_path: Path, factor: float, num_slow: int, is_running: bool, culprits: list[tuple[int, ...]]
) -> None:
    slow = Spell(ranks=(1,), factor=factor, first=1500 - num_slow)
    generate(tmp_path / "run", Job(dp=2, steps=1500, layers=1, layer_ns=80_000_000, spells=(slow,)))
    if is_running:
        manifest = tmp_path / "run" / paths.MANIFEST
        document = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**document, "ended_realtime_ns": 0, "exit_status": None}))
    verdict = diagnose_run(tmp_path / "run")
    assert [finding.culprit_ranks for finding in verdict.findings] == culprits
    if culprits:
        assert verdict.findings[0].kind == "slow-rank"
        assert "over the whole run no rank is late as often" in verdict.findings[0].evidence[-1]
