"""A mismatch that gloo lets pass is told of while the job goes on, and dated in the run."""

import json
import threading
from pathlib import Path

import pytest

from dtprof.launch import comparison_thread
from dtprof.launch.comparison_thread import Comparer, Mismatch
from dtprof.records import paths, schema, writer
from dtprof.records.shared_follower import SharedFollower, Subscription
from dtprof.session.job_recording import compare_while_running
from dtprof.session.run_diagnosis import diagnose_run
from tests import jobs
from tests.builders import RankBuilder, write_run


@pytest.mark.jobs
def test_another_reduction_is_reported_while_the_job_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = jobs.PROGRAMS / "mismatched.py"
    command = [*jobs.DTPROF, "run", "-o", str(run), "--", *jobs.forked(2, program, str(tmp_path / "told"))]
    with jobs.started(command, tmp_path) as job:
        job.wait_until(lambda: "reduce-op-mismatch" in job.stderr)
        (tmp_path / "told").touch()  # only then does the job end
        assert job.wait() == 0, job.stderr
    assert job.stderr.count("ranks pair mismatched operations: results are invalid; the job goes on") == 1
    assert f"{program}:" in job.stderr
    (told,) = [
        json.loads(line) for file in run.glob(f"node-*/{paths.MISMATCHES}") for line in file.read_text().splitlines()
    ]
    assert told["kind"] == "reduce-op-mismatch"
    (finding,) = [one for one in diagnose_run(run).findings if one.kind == "reduce-op-mismatch"]
    assert finding.seq == told["seq"]
    assert any("reported it while the job ran" in fact for fact in finding.evidence)


def nothing(run: Path) -> Subscription:
    """Return the records of a run without ranks."""
    return SharedFollower(run, boot_id=None).subscribe()


@pytest.fixture
def only_last_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be looked at before the job has ended, however slow this machine is."""
    monkeypatch.setattr(comparison_thread, "EVERY_S", 1000.0)


@pytest.mark.usefixtures("only_last_looks")
def test_a_look_that_fails_is_reported_and_ends_the_comparison_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(is_last: bool) -> list[Mismatch]:
        raise RuntimeError(f"broken {is_last}")

    (tmp_path / "rank-00000.0").mkdir()
    comparer = Comparer(lambda _: look, nothing(tmp_path), tmp_path / "node-a", say=print)
    comparer.stop(compares_last=True)
    assert "broken True" in capsys.readouterr().err


@pytest.mark.usefixtures("only_last_looks")
def test_a_last_poll_that_takes_too_long_is_left_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def look(is_last: bool) -> list[Mismatch]:
        assert release.wait(60) == is_last
        return []

    monkeypatch.setattr(comparison_thread, "STOP_S", 0.05)
    (tmp_path / "rank-00000.0").mkdir()
    said: list[str] = []
    comparer = Comparer(lambda _: look, nothing(tmp_path), tmp_path / "node-a", say=said.append)
    comparer.stop(compares_last=True)
    release.set()
    comparer._thread.join(60)
    assert [text.split(":")[0] for text in said] == ["the newest operations of the ranks were not compared"]


@pytest.mark.usefixtures("only_last_looks")
def test_launchers_of_one_run_tell_a_mismatch_once_between_them(tmp_path: Path) -> None:
    found = [Mismatch(kind="size-mismatch", group="0", seq=seq, summary="sizes", text=f"at {seq}") for seq in (3, 9)]
    (tmp_path / "rank-00000.0").mkdir()
    said: list[str] = []
    for node, seen in (("node-a", found), ("node-b", found), ("node-a", found[:1])):
        Comparer(lambda _, seen=seen: lambda _: seen, nothing(tmp_path), tmp_path / node, say=said.append).stop(
            compares_last=True
        )
    assert [text.splitlines()[1] for text in said] == ["at 3", "at 9"]
    assert len((tmp_path / "node-a" / paths.MISMATCHES).read_text().splitlines()) == 2
    assert not (tmp_path / "node-b").exists()


@pytest.mark.usefixtures("only_last_looks")
def test_nothing_is_looked_at_where_the_job_failed(tmp_path: Path) -> None:
    looked: list[bool] = []

    def look(is_last: bool) -> list[Mismatch]:
        looked.append(is_last)
        return []

    Comparer(lambda _: look, nothing(tmp_path), tmp_path, say=print).stop(compares_last=False)
    assert looked == []


def test_records_on_disk_are_followed_and_reported_with_both_lines(tmp_path: Path) -> None:
    ranks = [RankBuilder(rank, world_size=2, boot_id=writer.boot_id()) for rank in range(2)]
    for rank in ranks:
        for step in range(30):
            odd = rank.rank == 1 and step == 20
            site = rank.site(line=9 if odd else 5)
            rank.op("all_reduce", step * 100, step * 100 + 10, nbytes=8, reduce_op="max" if odd else "sum", site=site)
    look = compare_while_running(
        SharedFollower(write_run(tmp_path / "run", ranks), boot_id=writer.boot_id()).subscribe()
    )
    (mismatch,) = look(False)
    assert (mismatch.kind, mismatch.seq) == ("reduce-op-mismatch", 20)
    assert "train.py:9" in mismatch.text
    assert "train.py:5" in mismatch.text
    assert list(look(True)) == []


def test_the_last_poll_takes_handles_that_nobody_waited_for_and_more_than_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "SEGMENT_SIZE", 1 << 14)
    monkeypatch.setattr(schema, "SEGMENT_CAPACITY", 100)
    ranks = [RankBuilder(rank, world_size=2, boot_id=writer.boot_id()) for rank in range(2)]
    for rank in ranks:
        for number in range(450):
            odd = rank.rank == 1 and number == 449
            t = number * 10
            rank.op("all_reduce", t, t + 5, nbytes=8, reduce_op="max" if odd else "sum", is_async=True)
    look = compare_while_running(
        SharedFollower(write_run(tmp_path / "run", ranks), boot_id=writer.boot_id()).subscribe()
    )
    assert list(look(False)) == []
    assert [(mismatch.kind, mismatch.seq) for mismatch in look(True)] == [("reduce-op-mismatch", 449)]
