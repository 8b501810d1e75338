"""What `dtprof top` shows: what each rank does, what is wrong, within 80 columns."""

import dataclasses
import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.run_monitor import JobSnapshot, Monitor
from dtprof.monitor.step_aggregates import LiveFigures, StepAggregates
from dtprof.monitor.terminal.top_screen import render_reading, render_screen
from dtprof.records import events, paths, writer
from dtprof.records.tables import ProcessExit
from tests import builders
from tests.builders import RankBuilder
from tests.monitor.test_live_run import MS, STEP, two_ranks


def running(ranks: list[RankBuilder], folder: Path) -> Path:
    """Write a run that goes on."""
    for rank in ranks:
        rank.closed = False
    run = builders.write_run(folder, ranks)
    (run / "run.json").write_text('{"format_version": 1, "command": ["torchrun"], "started_realtime_ns": 1}')
    return run


def tell_mismatch(run: Path, seq: int, *, after_s: float) -> str:
    """Write down a mismatch as the launcher does; return what it says."""
    summary = (
        f"Operation #{seq} of group 'dp' (ranks 0-1) has different dtypes: rank 1 has float64, the others float32."
    )
    told = {"kind": "dtype-mismatch", "group": "dp", "seq": seq, "summary": summary}
    started_ns = json.loads((run / "run.json").read_text())["started_realtime_ns"]
    node = run / "node-here"
    node.mkdir(exist_ok=True)
    with (node / paths.MISMATCHES).open("a") as file:
        file.write(json.dumps(told | {"realtime_ns": started_ns + int(after_s * 1e9)}) + "\n")
    return summary


def screen(snapshot: JobSnapshot, run: Path, height: int = 24, width: int = 80) -> list[str]:
    """Return the lines of the screen."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_screen(snapshot, run, height=height, width=width))
    return console.export_text().splitlines()


def test_run_without_records_says_so_and_shows_no_table(tmp_path: Path) -> None:
    run = running([], tmp_path / "run")
    assert screen(Monitor(run).poll(), run) == [
        "run  running",
        "no rank has recorded anything yet",
        "q quits",
    ]


def test_host_of_which_nothing_is_heard_any_more_is_an_alarm(tmp_path: Path) -> None:
    ranks = two_ranks(8)
    for rank, host in zip(ranks, ("a", "b"), strict=True):
        rank.host = rank.boot_id = f"host-{host}"
    run = running(ranks, tmp_path / "run")
    for host, written_s in (("host-a", 1000), ("host-b", 1000 - 9)):
        file = run / paths.node_folder_name(host) / "samples.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}\n")
        os.utime(file, (written_s, written_s))
    monitor = Monitor(run)
    assert not any("silent" in alarm for alarm in monitor.poll().alarms), "samples come every second or two"
    os.utime(run / paths.node_folder_name("host-a") / "samples.jsonl", (1012, 1012))
    alarms = monitor.poll().alarms
    assert "host host-b is silent: nothing was heard of it for 21 s while others were" in alarms
    assert any("host-b is silent" in line for line in screen(monitor.poll(), run, width=100))


def test_rank_inside_a_collective_is_shown_with_its_line(tmp_path: Path) -> None:
    ranks = two_ranks(8)
    ranks[1].op("all_reduce", 900 * MS, site=ranks[1].site(file="/home/me/train.py", line=42))
    ranks[0].span("forward", 900 * MS)
    for rank in ranks:
        rank.boot_id = writer.boot_id()
    run = running(ranks, tmp_path / "run")
    snapshot = Monitor(run).poll()
    first, second = snapshot.ranks
    assert (first.doing, first.blocks) == ("forward", False)
    assert (second.doing, second.blocks, second.where) == ("all_reduce #8 of default_pg", True, "train.py:42")
    assert second.since_ns is not None
    assert snapshot.progress.quiet_s == second.since_ns / 1e9  # the begin of both is the newest record
    assert snapshot.alarms[0].startswith("stalled: no rank has made progress for")
    lines = screen(snapshot, run)
    assert all(len(line) <= 80 for line in lines)
    assert any("all_reduce #8 of default_pg" in line for line in lines)
    assert any(line.startswith("100 ms a step") for line in lines)
    row = next(line.split() for line in lines if line.strip().startswith("1 "))
    assert row[:7] == ["1", "8", "100", "ms", "25", "%", "20"]


def test_steps_are_those_that_the_program_marks(tmp_path: Path) -> None:
    ranks = two_ranks(12)
    for rank in ranks:
        for number in range(1, 11):  # the optimizers ended two steps before the first mark
            rank.span("step", (number + 2) * STEP - MS, (number + 2) * STEP - MS, step=number + 1, microbatch=number)
    snapshot = Monitor(running(ranks, tmp_path / "run")).poll()
    assert (snapshot.step, [rank.step for rank in snapshot.ranks]) == (10, [10, 10])


def test_alarm_comes_when_nothing_moves_and_goes_when_it_does(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    now = [0.0]
    monitor = Monitor(run, clock=lambda: now[0])
    slow = [alarm for alarm in monitor.poll().alarms if "slow" in alarm]
    assert len(slow) == 1
    assert slow[0].startswith("rank 0 is slow in backward: costs the others 20.0 ms a step")
    now[0] = 30.0
    snapshot = monitor.poll()
    assert snapshot.alarms[0] == (
        "stalled: no rank has made progress for 30 s (stall threshold 10 s: 10 s, as no --hang-after is given)"
    )
    assert f"why: dtprof diagnose {run}" in " ".join(line.strip() for line in screen(snapshot, run))
    grown = running(two_ranks(9), tmp_path / "grown")
    for rank in ("rank-00000.0", "rank-00001.0"):
        with (run / rank / "events.00000").open("r+b") as file:
            file.write((grown / rank / "events.00000").read_bytes())
    assert not any("stalled" in alarm for alarm in monitor.poll().alarms)


def test_mismatch_is_an_alarm_as_soon_as_the_launcher_tells_of_it(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    monitor = Monitor(run)
    assert not any("mismatch" in alarm for alarm in monitor.poll().alarms)
    summary = tell_mismatch(run, 3, after_s=12.4)
    for seq in (4, 5, 6):
        tell_mismatch(run, seq, after_s=20)
    snapshot = monitor.poll()
    told = [alarm for alarm in snapshot.alarms if "mismatch" in alarm]
    assert told[0] == f"mismatch 12 s after the start: {summary}"
    assert told[2:] == ["2 more mismatches"]
    lines = screen(snapshot, run)
    assert all(len(line) <= 80 for line in lines)
    assert f"! {told[0]}" in " ".join(line.strip() for line in lines)
    assert len(screen(snapshot, run, height=16)) <= 16


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (80, "rank step step time comm wait   memory   for does now"),
        # 5 + 5 + 10 + 5 + 5 + 9 + 6 columns and 14 for what a rank does: 59
        (59, "rank step step time comm wait   memory   for does now"),
        (58, "rank step step time wait   memory   for does now"),
        (40, "rank step step time   for does now"),
        (20, "rank does now"),
    ],
)
def test_narrow_terminals_show_what_a_rank_does_and_leave_out_numbers(width: int, head: str, tmp_path: Path) -> None:
    ranks = two_ranks(8)
    ranks[1].op("all_reduce", 900 * MS)
    run = running(ranks, tmp_path / "run")
    snapshot = Monitor(run).poll()
    snapshot = dataclasses.replace(
        snapshot, alarms=(), ranks=[dataclasses.replace(rank, since_ns=12 * 10**8) for rank in snapshot.ranks]
    )
    lines = screen(snapshot, run, width=width)
    at = next(at for at, line in enumerate(lines) if line.startswith("rank"))
    assert lines[at].rstrip() == head
    assert "all_reduce" in lines[at + 2]
    assert max(map(len, lines)) <= width


def test_what_ranks_do_is_shown_before_their_means(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    monitor = Monitor(run)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_reading(run, monitor.num_ranks))
    assert console.export_text().splitlines() == ["run", "reading 2 ranks ..."]
    first = monitor.poll(summarises=False)
    assert screen(first, run)[1] == "2 ranks, step 8; working out their means ..."
    assert [rank.step for rank in first.ranks] == [8, 8]
    assert screen(monitor.poll(), run)[1].startswith("2 of 2 ranks on 1 host")


def test_rates_have_a_line_of_80_columns(tmp_path: Path) -> None:
    ranks = two_ranks(8)
    for rank in ranks:
        rank.sample(events.TOKENS, 1, 4096)
    run = running(ranks, tmp_path / "run")
    lines = screen(Monitor(run).poll(), run)
    assert lines[1] == "2 of 2 ranks on 1 host, gloo, step 8"
    assert lines[2] == "100 ms a step (p90 100 ms), 81,920 tokens/s"  # 2 x 4096 in 0.1 s


def test_those_that_the_launcher_stopped_come_after_the_one_that_died(tmp_path: Path) -> None:
    for statuses, told in (
        ((-15, -15, -9, -15), ("rank 2 was killed by SIGKILL", "then ranks 0, 1, 3 were stopped by SIGTERM")),
        ((-15, -15, -15, -15), ("all 4 ranks were stopped by SIGTERM",)),
        ((None, -15, 1, 1), ("ranks 2, 3 exited 1", "then rank 1 was stopped by SIGTERM")),
        ((1,) * 20, ("all 20 ranks exited 1",)),
        ((1, -9, *(1,) * 9), ("rank 1 was killed by SIGKILL", "the other 10 ranks exited 1")),
        (
            (1, -9, *(-15,) * 9),
            ("rank 0 exited 1", "rank 1 was killed by SIGKILL", "then the other 9 ranks were stopped by SIGTERM"),
        ),
    ):
        ranks = [RankBuilder(number, len(statuses)) for number in range(len(statuses))]
        for rank in ranks:
            rank.op("barrier", 0, MS)
        ended = [(rank, status) for rank, status in zip(ranks, statuses, strict=True) if status is not None]
        exits = [ProcessExit(pid=rank.pid, status=status, t_ns=1) for rank, status in ended]
        run = builders.write_run(tmp_path / told[-1], ranks, exits=exits)
        assert Monitor(run).poll().alarms == told


def test_a_slow_rank_of_a_job_that_is_over_was_slow(tmp_path: Path) -> None:
    assert (
        Monitor(running(two_ranks(20), tmp_path / "on"))
        .poll()
        .alarms[0]
        .startswith("rank 0 is slow in backward: costs the others 20.0 ms")
    )
    over = builders.write_run(tmp_path / "over", two_ranks(20))
    assert Monitor(over).poll().alarms[0].startswith("rank 0 was slow in backward: costs the others 20.0 ms")


def test_damaged_description_of_a_job_is_reported_and_not_taken_for_a_job_that_runs(tmp_path: Path) -> None:
    run = builders.write_run(tmp_path / "run", two_ranks(4))
    (run / "run.json").write_text("[1]")
    clock = iter([0.0, *[1000.0] * 16])
    snapshot = Monitor(run, clock=lambda: next(clock)).poll()
    assert snapshot.alarms[0] == (
        f"{run}/run.json holds list, not an object; expected the JSON object that `dtprof run` writes: put it back, or "
        "go by what the ranks recorded"
    )
    assert "stalled" not in str(snapshot.alarms)  # all ranks have ended
    assert screen(snapshot, run)[0] == "run  cannot tell whether it goes on"


def test_ranks_in_worse_state_are_shown_where_not_all_fit(tmp_path: Path) -> None:
    ranks = [RankBuilder(number, 40) for number in range(40)]
    for rank in ranks:
        rank.op("barrier", 0, MS)
    run = builders.write_run(tmp_path / "run", ranks, exits=[ProcessExit(pid=ranks[33].pid, status=-9, t_ns=1)])
    snapshot = Monitor(run).poll()
    assert snapshot.alarms == ("rank 33 was killed by SIGKILL",)
    lines = screen(snapshot, run, height=12)
    assert len(lines) <= 12
    assert any(line.strip().startswith("33 ") and "killed by SIGKILL" in line for line in lines)
    assert "more ranks" in lines[-1]


def test_summary_takes_a_bounded_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    now = [0.0]
    monitor = Monitor(run, clock=lambda: now[0])
    real = StepAggregates.take
    count = 0

    def slow(aggregates: StepAggregates, window: LiveWindow) -> LiveFigures:
        nonlocal count
        count += 1
        now[0] += 0.5
        return real(aggregates, window)

    monkeypatch.setattr(StepAggregates, "take", slow)
    for second in range(200):
        now[0] = max(now[0], float(second))
        monitor._has_news = True
        monitor.poll()
    assert 2 <= count <= 5


@pytest.mark.parametrize("arguments", [["--once"], []])
def test_without_a_terminal_one_screen_is_printed(arguments: list[str], tmp_path: Path) -> None:
    run = running(two_ranks(4), tmp_path / "run")
    command = [sys.executable, "-m", "dtprof", "top", str(run), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, f"next: dtprof diagnose {run}\n")
    assert "does now" in ended.stdout
    assert "\x1b" not in ended.stdout


@pytest.mark.parametrize(("how", "status"), [("q", 0), ("SIGTERM", 143)])
def test_however_it_is_ended_the_terminal_is_as_before(how: str, status: int, tmp_path: Path) -> None:
    import termios

    run = running(two_ranks(4), tmp_path / "run")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "dtprof", "top", str(run)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    try:
        shown = b"".join(_shown(ours, process, until=b"does now"))
        if how == "q":
            os.write(ours, b"q")
        else:
            process.terminate()
        shown += b"".join(_shown(ours, process))
        assert process.returncode == status
        assert shown.count(b"\x1b[?1049l") == shown.count(b"\x1b[?1049h") == 1
        assert termios.tcgetattr(theirs) == before
        assert b"q quits" in shown
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


def test_a_terminal_that_cannot_be_redrawn_gets_one_screen(tmp_path: Path) -> None:
    run = running(two_ranks(8), tmp_path / "run")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dtprof", "top", str(run)]
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        shown = b"".join(_shown(ours, process))
        assert process.wait(60) == 0
        assert shown.count(b"2 of 2 ranks on 1 host, gloo, step 8") == 1
        assert b"next: dtprof diagnose " in shown
        assert b"q quits" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


def _shown(terminal: int, process: "subprocess.Popen[bytes]", until: bytes | None = None) -> Iterator[bytes]:
    """Give what a process writes to a terminal until it has written this, or has ended."""
    seen = b""
    while until is None or until not in seen:
        ended = process.poll() is not None
        if select.select([terminal], [], [], 0.1)[0]:
            seen += (piece := os.read(terminal, 4096))
            yield piece
        elif ended:
            return
