"""Several sources of one job: what one does not know another fills in, before the rules read it."""

from dataclasses import replace
from pathlib import Path

from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.source_merging import merge
from dtprof.diagnosis.sources.flight_recorder.dump_files import read_dumps
from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable
from dtprof.diagnosis.sources.flight_recorder.dumped_ranks import gather_dumps
from dtprof.diagnosis.sources.logs.log_reader import read_logs
from dtprof.diagnosis.verdict import decide
from dtprof.records.manifest import Manifest
from dtprof.records.schema import FLAG
from dtprof.records.tables import UNKNOWN_NS, ExceptionRecord, ProcessExit
from dtprof.session.job_diagnosis import diagnose
from tests.builders import RankBuilder
from tests.diagnosis import log_texts as texts
from tests.diagnosis.dump_builder import job, write
from tests.diagnosis.judging import build_job

CRASH = texts.traceback("ValueError: bad shard", line=61, source="check(x)", prefix="[rank2]: ")


def waiting_dumps(folder: Path, world: int, *ranks: int) -> Path:
    """Write dumps of some ranks of a job; all wait in the second all_reduce, at line 9."""
    dumps = [rank.op("all_reduce", line=8).op("all_reduce", line=9, done=False) for rank in job(world)]
    write(folder, [dumps[rank] for rank in ranks])
    return folder


def with_log(folder: Path, text: str) -> Verdict:
    """Return the verdict on the dumps of a folder together with a log."""
    (folder / "output.log").write_text(text)
    return diagnose([folder])


def state(
    ranks: int,
    *,
    source: str = "run",
    ended: bool = True,
    stalled: bool = False,
    statuses: dict[int, int] | None = None,
) -> JobState:
    """Return a job of which nothing but exits is known."""
    ends = {rank: (statuses or {}).get(rank, 0) for rank in range(ranks)}
    return JobState(
        ranks={
            rank: RankState(
                rank=rank,
                attempt=0,
                pid=100 + rank,
                host="a",
                last_ns=5,
                exit=ProcessExit(pid=100 + rank, status=status, t_ns=9) if ended else None,
                sees_program=source == "run",
            )
            for rank, status in ends.items()
        },
        world_size=ranks,
        manifest=Manifest(exit_status=1 if any(ends.values()) else 0, ended_realtime_ns=1),
        stalled=stalled,
        stopped_on_hang_ns=None,
        sources=(source,),
    )


def test_the_exception_of_a_log_explains_the_waits_of_the_dumps(tmp_path: Path) -> None:
    verdict = with_log(waiting_dumps(tmp_path, 3, 0, 1), CRASH)
    (finding,) = verdict.findings
    assert (verdict.outcome, verdict.source) == ("crash", ("flight_recorder", "log"))
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[2].line) == ("rank-crashed", (2,), 61)
    # The dumps count from 1: the second all_reduce of each is #2.
    assert (finding.waiting_ranks, finding.op, finding.seq) == ((0, 1), "all_reduce", 2)
    assert finding.call_sites[0].line == 9
    assert (verdict.ranks_seen, verdict.ranks_missing) == ((0, 1, 2), ())


def test_a_launcher_that_saw_a_rank_killed_explains_the_waits_of_the_dumps(tmp_path: Path) -> None:
    (finding,) = with_log(waiting_dumps(tmp_path, 3, 0, 1), texts.table({0: -15, 1: -15, 2: -9}, first=2)).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-killed", (2,), (0, 1))


def test_a_rank_that_the_launcher_does_not_list_as_failed_had_left_the_others(tmp_path: Path) -> None:
    (finding,) = with_log(waiting_dumps(tmp_path, 3, 0, 2), texts.table({0: -15, 2: 1}, first=2)).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (1,), (0, 2))


def test_a_rank_without_a_dump_whose_log_says_it_timed_out_is_not_accused(tmp_path: Path) -> None:
    alone = diagnose([waiting_dumps(tmp_path, 4, 0, 1, 2)])
    assert alone.findings[0].culprit_ranks == (3,)  # three of four wait, and the fourth left nothing
    verdict = with_log(tmp_path, "\n".join(texts.watchdog(rank, seq=2) for rank in range(4)))
    assert verdict.outcome == "hang"
    assert all(3 not in finding.culprit_ranks for finding in verdict.findings)


def test_a_log_that_names_nothing_leaves_the_verdict_of_the_dumps(tmp_path: Path) -> None:
    alone = diagnose([waiting_dumps(tmp_path, 4, 0, 1, 2)])
    together = with_log(tmp_path, "[rank0]: step 1 loss 2.3\n[rank3]: step 1 loss 2.3\n")
    assert (together.outcome, together.findings) == (alone.outcome, alone.findings)
    assert together.ranks_missing == alone.ranks_missing


def test_the_end_that_records_lack_comes_from_the_log(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text(texts.table({0: -15, 1: -9}, first=1))
    records = state(2, ended=False)
    records = replace(records, manifest=Manifest(exit_status=1, ended_realtime_ns=1))
    merged = merge([records, *read_logs([tmp_path / "output.log"])])
    assert merged.ranks[1].pid == 101  # what records know stays
    assert merged.ranks[1].exit is not None
    assert (merged.ranks[1].exit.status, merged.ranks[1].exit.t_ns) == (-9, UNKNOWN_NS)
    (finding,) = decide(merged).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (1,))


def test_sources_that_tell_other_ends_of_a_rank_are_named() -> None:
    raised = ExceptionRecord(t_ns=1, type="ValueError", message="x", traceback="", frame=None)
    log = state(2, source="log", statuses={1: -9})
    log = replace(log, ranks=log.ranks | {1: replace(log.ranks[1], exceptions=(raised,))})
    merged = merge([state(2, statuses={1: 1}), log])
    assert merged.ranks[1].exceptions == ()  # of what may be another job nothing is filled in
    assert merged.ranks[1].exit is not None
    assert merged.ranks[1].exit.status == 1
    assert "rank 1 ended with exit status 1 in run, with signal 9 in log" in merged.problems[0]


def test_a_run_in_which_nothing_went_wrong_is_not_that_of_dumps_of_a_hang() -> None:
    dumps = state(2, source="flight_recorder", ended=False, stalled=True)
    merged = merge([state(2), dumps])
    assert (merged.stalled, merged.sources) == (True, ("run", "flight_recorder"))
    assert "nothing went wrong: is it the job of the flight recorder given?" in merged.problems[0]


def test_dumps_of_ranks_that_the_run_never_had_are_of_another_job() -> None:
    dumps = replace(state(2, source="flight_recorder", ended=False, stalled=True), members=(0, 1, 2, 3))
    merged = merge([state(2), dumps])
    assert "the dumps are of 4 ranks, the run of 2: not of one job" in merged.problems[0]


def recorded(rank: int, num_ops: int, *, flags: int, line: int = 9) -> RankBuilder:
    """Return the records of a rank whose device nobody followed: all its calls returned at once."""
    built = RankBuilder(rank, 3, closed=False)
    for seq in range(num_ops):
        site = built.site("all_reduce", file="/home/user/train.py", line=8 if seq < 3 else line, function="train")
        built.op("all_reduce", 1000 * seq, returned=1000 * seq + 5, site=site, nbytes=32, dtype="float32", flags=flags)
    return built


def dumped(folder: Path, num_ops: dict[int, int], *, begun: bool) -> JobState:
    """Return what dumps tell of ranks whose devices completed three all_reduces and are in the fourth."""
    ranks = job(3)
    for rank in ranks:
        for seq in range(num_ops[rank.rank]):
            state = "" if seq != 3 or not begun else "started"
            rank.op("all_reduce", line=8 if seq < 3 else 9, done=seq < 3, state=state)
    return gather_dumps(*read_dumps(write(folder, ranks), labels := ArgumentTable()), labels)


def test_records_learn_from_dumps_what_devices_completed_and_began(tmp_path: Path) -> None:
    records = build_job([recorded(rank, 3 if rank == 2 else 5, flags=FLAG["device"]) for rank in range(3)])
    assert all(not rank.open_operations for rank in records.ranks.values())
    merged = merge([records, dumped(tmp_path, {0: 5, 1: 5, 2: 3}, begun=True)])
    first = merged.ranks[0]
    assert [o.done for o in first.operations] == [True, True, True, False, False]
    assert [(o.seq, o.started, o.open) for o in first.open_operations] == [(3, True, True), (4, False, True)]
    finding = decide(merged).findings[0]
    assert (finding.culprit_ranks, finding.waiting_ranks, finding.seq) == ((2,), (0, 1), 3)
    assert finding.call_sites[0].line == 9


def test_what_records_know_of_begins_stays_where_dumps_tell_none(tmp_path: Path) -> None:
    ranks = [recorded(rank, 4, flags=FLAG["device"] | FLAG["followed"]) for rank in range(3)]
    for rank in ranks:
        for seq in range(4 if rank.rank != 1 else 3):
            ran = (1000 * seq + 100, 1000 * seq + 200 if seq < 3 else None)
            rank.device_interval("operation", "all_reduce", *ran, host=(1000 * seq, 0), seq=seq)
    merged = merge([build_job(ranks), dumped(tmp_path, dict.fromkeys(range(3), 4), begun=False)])
    assert [merged.ranks[rank].open_operations[0].started for rank in range(3)] == [True, False, True]
    finding = decide(merged).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (1,))


def test_a_running_job_whose_devices_nobody_follows_hangs_by_its_dumps(tmp_path: Path) -> None:
    ranks = [recorded(rank, 3 if rank == 2 else 4, flags=FLAG["device"]) for rank in range(3)]
    records = build_job(ranks, exit_status=None, stalled=False)
    verdict = decide(merge([records, dumped(tmp_path, {0: 4, 1: 4, 2: 3}, begun=False)]))
    assert (verdict.outcome, verdict.findings[0].culprit_ranks) == ("hang", (2,))


def test_operations_that_two_sources_count_otherwise_are_not_paired(tmp_path: Path) -> None:
    # The records lack a line that the dumps have: what is at one position is another call.
    ranks = [recorded(rank, 4, flags=FLAG["device"], line=7) for rank in range(3)]
    merged = merge([build_job(ranks), dumped(tmp_path, dict.fromkeys(range(3), 4), begun=True)])
    assert all(not rank.open_operations for rank in merged.ranks.values())
    assert "do not count the operations of the default group alike" in merged.problems[0]
