"""Jobs that somebody stopped: whether they stalled before, judged by their usual pauses."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dtprof.diagnosis.findings import Verdict
from dtprof.records import paths, writer
from dtprof.records.tables import ProcessExit
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import START_NS, RankBuilder, write_run
from tests.diagnosis.judging import CONNECTION_LOST

SECOND = 10**9
STEPS = 4
FIRST = 100 * SECOND
LAST = FIRST + STEPS * SECOND
"""When rank 0 comes to the operation that rank 1 does not come to, ns after the start: steps take a second."""


def blocked(*, pause_s: int = 0, waits: bool = True) -> list[RankBuilder]:
    """Return two ranks; rank 0 waits for rank 1 at last. After the second step nothing began for `pause_s` longer."""
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        site = rank.site("all_reduce", line=20)
        for step in range(STEPS + (waits and rank.rank == 0)):
            t = FIRST + step * SECOND - (pause_s * SECOND if step < 2 else 0)
            done = t + 10 if step < STEPS else None
            rank.op("all_reduce", t, done, returned=t + 1, step=step, site=site, nbytes=8)
    return ranks


def stop(folder: Path, ranks: list[RankBuilder], after_ns: int, how: int = signal.SIGTERM, **facts: Any) -> Verdict:
    """Return the verdict on ranks that a signal ended so long after the last that they did."""
    exits = [ProcessExit(pid=rank.pid, status=-how, t_ns=START_NS + LAST + after_ns) for rank in ranks]
    run = write_run(folder, ranks, exit_status=1, exits=exits)
    manifest = run / paths.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | facts))
    return diagnose_run(run)


def interrupt(ranks: list[RankBuilder], after_ns: int) -> None:
    """Let Ctrl-C find rank 1 at line 31, and rank 0 lose its peer by that, in the operation that it waits in."""
    ranks[1].exception(LAST + after_ns, "KeyboardInterrupt", "", line=31)
    ranks[0].exception(LAST + after_ns + 1000, "RuntimeError", CONNECTION_LOST, line=20)


def test_a_job_that_went_on_until_it_was_stopped_hung_in_nothing(tmp_path: Path) -> None:
    verdict = stop(tmp_path / "run", blocked(), 300_000_000)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert verdict.cannot_tell == (
        "the job was stopped from outside (SIGINT, SIGTERM or SIGHUP); no fault was detected before that",
    )


def test_a_job_that_stood_still_for_longer_than_ever_hung(tmp_path: Path) -> None:
    verdict = stop(tmp_path / "run", blocked(), 12 * SECOND)
    assert (verdict.outcome, verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == (
        "hang",
        "rank-stuck",
        (1,),
    )


def test_where_it_had_paused_for_nearly_as_long_before_it_may_have_hung(tmp_path: Path) -> None:
    verdict = stop(tmp_path / "run", blocked(pause_s=9), 12 * SECOND)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert "nothing had been recorded for 12 s" in reason
    assert "once issued nothing for 10 s" in reason
    assert "rank 0 at /home/me/train.py:20" in reason


def test_a_job_that_stalled_without_a_cause_says_what_is_known_of_its_wait(tmp_path: Path) -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        rank.span("init_process_group", FIRST, site=rank.site("", line=3))
    verdict = stop(tmp_path / "run", ranks, 120 * SECOND)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert "it had stalled; all 2 ranks wait in init_process_group and none is missing" in reason


def test_what_dtprof_run_saw_to_hang_hung_however_long_its_pauses_were(tmp_path: Path) -> None:
    seen = {"hang_detected_ns": START_NS + LAST + 11 * SECOND}
    verdict = stop(tmp_path / "run", blocked(pause_s=9), 12 * SECOND, **seen)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-stuck")


def test_a_hang_that_passed_before_the_job_was_stopped_counts_no_more(tmp_path: Path) -> None:
    verdict = stop(tmp_path / "run", blocked(), 300_000_000, hang_detected_ns=START_NS + FIRST)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())


@pytest.mark.parametrize(("after_s", "outcome"), [(0, "unknown"), (12, "hang")])
def test_ctrl_c_is_no_crash_and_shows_where_it_found_a_rank(tmp_path: Path, after_s: int, outcome: str) -> None:
    ranks = blocked()
    interrupt(ranks, after_s * SECOND)
    exits = [ProcessExit(pid=ranks[1].pid, status=-2, t_ns=START_NS + LAST + after_s * SECOND + 10**6)]
    exits.append(ProcessExit(pid=ranks[0].pid, status=1, t_ns=START_NS + LAST + after_s * SECOND + 10**6))
    verdict = diagnose_run(write_run(tmp_path / "run", ranks, exit_status=1, exits=exits))
    assert verdict.outcome == outcome
    if verdict.findings:
        (finding,) = verdict.findings
        assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[1].line) == ("rank-stuck", (1,), 31)
        assert finding.evidence == ("rank 1: Ctrl-C (SIGINT) found it at /home/me/train.py:31 (main)",)


def test_ranks_killed_together_after_they_stood_still_did_not_die_of_that(tmp_path: Path) -> None:
    verdict = stop(tmp_path / "run", blocked(), 12 * SECOND, signal.SIGKILL)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-stuck", (1,))


def test_ranks_killed_together_after_dtprof_run_reported_a_hang_hung(tmp_path: Path) -> None:
    seen = {"hang_detected_ns": START_NS + LAST + 11 * SECOND}
    verdict = stop(tmp_path / "run", blocked(pause_s=9), 12 * SECOND, signal.SIGKILL, **seen)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-stuck")


@pytest.mark.parametrize(
    ("after_s", "facts", "waits"), [(0.3, {}, True), (12, {"oom_kills": 2}, True), (12, {}, False)]
)
def test_ranks_killed_together_while_they_went_on_or_for_want_of_memory_were_killed(
    tmp_path: Path, after_s: float, facts: dict[str, Any], waits: bool
) -> None:
    verdict = stop(tmp_path / "run", blocked(waits=waits), int(after_s * SECOND), signal.SIGKILL, **facts)
    assert (verdict.outcome, verdict.findings[0].kind) == ("crash", "rank-killed")


@pytest.mark.parametrize(("after_s", "outcome"), [(0, "unknown"), (12, "hang")])
def test_a_rank_that_is_killed_as_it_does_not_end_when_asked_did_not_die_first(
    tmp_path: Path, after_s: int, outcome: str
) -> None:
    """A rank inside a wait does not see SIGINT; launchers kill it half a minute later."""
    ranks = blocked()
    ranks[1].exception(LAST + after_s * SECOND, "KeyboardInterrupt", "", line=31)
    asked_ns = START_NS + LAST + after_s * SECOND + 10**6
    exits = [ProcessExit(pid=ranks[1].pid, status=-2, t_ns=asked_ns)]
    exits.append(ProcessExit(pid=ranks[0].pid, status=-9, t_ns=asked_ns + 30 * SECOND))
    verdict = diagnose_run(write_run(tmp_path / "run", ranks, exit_status=1, exits=exits))
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == (
        outcome,
        ["rank-stuck"] if outcome == "hang" else [],
    )


def test_a_rank_that_waited_for_too_long_was_not_stopped_though_its_peers_were(tmp_path: Path) -> None:
    ranks = blocked()
    ranks[0].exception(LAST + 2 * SECOND, "RuntimeError", "[gloo] Timed out waiting 2000ms for recv", line=20)
    exits = [ProcessExit(pid=ranks[0].pid, status=1, t_ns=START_NS + LAST + 2 * SECOND + 10**6)]
    exits.append(ProcessExit(pid=ranks[1].pid, status=-15, t_ns=START_NS + LAST + 2 * SECOND + 10**8))
    verdict = diagnose_run(write_run(tmp_path / "run", ranks, exit_status=1, exits=exits))
    assert (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == ("rank-stuck", (1,))


@pytest.mark.parametrize(("after_s", "outcome"), [(-0.5, "healthy"), (1, "healthy"), (12, "hang")])
def test_of_a_run_that_was_killed_the_last_sample_of_its_node_tells_how_long_it_stood(
    tmp_path: Path, after_s: float, outcome: str
) -> None:
    ranks = blocked()
    run = write_run(tmp_path / "run", ranks)
    manifest = run / paths.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"ended_realtime_ns": 0, "exit_status": None}))
    sample = {
        "t": START_NS + LAST + int(after_s * SECOND),
        "host": [0.0] * 16,
        "cores": [],
        "gpus": {},
        "processes": {},
    }
    lines = [{"format": 1, "boot_id": ranks[0].boot_id}, sample]
    node = run / paths.node_folder_name(ranks[0].host)
    (node / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diagnose_run(run).outcome == outcome


def test_a_run_of_which_nobody_is_left_and_nobody_saw_the_end_is_not_healthy(tmp_path: Path) -> None:
    ranks = blocked(waits=False)
    for rank in ranks:
        rank.boot_id, rank.pid = writer.boot_id(), 2**22 + 1 + rank.rank  # more than Linux gives
    run = write_run(tmp_path / "run", ranks)
    manifest = run / paths.MANIFEST
    document = json.loads(manifest.read_text()) | {"ended_realtime_ns": 0, "exit_status": None}
    manifest.write_text(json.dumps(document | {"boot_id": writer.boot_id()}))
    verdict = diagnose_run(run)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert reason.startswith("ranks 0, 1 exited without an exit record: killed together with dtprof run")


def test_ranks_that_all_slept_outside_any_operation_are_reported_after_the_end_too(tmp_path: Path) -> None:
    ranks = blocked(waits=False)
    frame = {"name": "load", "filename": "/home/me/train.py", "line": 8}
    threads = [{"thread_id": 1, "thread_name": "MainThread", "active": False, "frames": [frame]}]
    told = {"state": "sleeping", "cpu_share": 0.0, "threads": threads}
    stacks = {"t_ns": START_NS + LAST + 59 * SECOND + 10, "processes": {str(rank.pid): told for rank in ranks}}
    node = tmp_path / "run" / paths.node_folder_name(ranks[0].host)
    node.mkdir(parents=True)
    (node / paths.STACKS).write_text(json.dumps(stacks))
    verdict = stop(tmp_path / "run", ranks, 90 * SECOND)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert reason.startswith(
        "the job was stopped from outside (SIGINT, SIGTERM or SIGHUP) after nothing was recorded for 60 s "
    )
    assert "every rank slept outside any collective: rank 0 at /home/me/train.py:8 (load); rank 1 at" in reason


def test_what_a_rank_did_after_dtprof_stopped_the_job_is_no_evidence(tmp_path: Path) -> None:
    ranks = blocked()
    site = ranks[1].site("all_reduce", line=20)
    # Rank 1 stood in a lock of rank 0: freed as that ended, it went on, and its own signal found it in the collective.
    ranks[1].op("all_reduce", LAST + 30 * SECOND, None, step=STEPS, site=site, nbytes=8)
    ranks[1].exception(LAST + 31 * SECOND, "RuntimeError", CONNECTION_LOST, line=20)
    hang_ns = START_NS + LAST + 20 * SECOND
    verdict = stop(
        tmp_path / "run", ranks, 31 * SECOND, stopped_on_hang=True, hang_detected_ns=hang_ns, boot_id="boot-a"
    )
    [finding] = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-stuck", (1,))
    assert finding.waiting_ranks == (0,)


def test_a_command_that_fails_before_any_rank_is_told_with_its_status(tmp_path: Path) -> None:
    verdict = diagnose_run(write_run(tmp_path / "run", [], exit_status=2))
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert verdict.cannot_tell[0].startswith("the command exited with status 2")
