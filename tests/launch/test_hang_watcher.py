"""The alarm of a job without progress: after the time given, once for what is new, and never by mistake."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dtprof.job.stalls import MIN_PAUSES
from dtprof.launch import hang_watcher, rendezvous_waits, stack_sampler
from dtprof.records import paths, schema, writer
from tests.builders import RankBuilder, write_rank

HEAD, MARKS = schema.HEADER_OFFSET["head"], schema.HEADER_OFFSET["marks"]


class Job:
    """A job of two ranks that the test moves forward, its watcher, and what came of it."""

    def __init__(self, folder: Path, hang_after_s: float) -> None:
        self.folder = folder
        self.now_s = 1000.0
        self.heads = {0: 0, 1: 0}
        self.said: list[str] = []
        self.kept: list[int] = []  # reports before each time that the program was kept
        self.num_diagnoses = 0
        self.verdict = hang_watcher.StallVerdict(is_hang=True, text="rank 1 never called all_reduce")
        self.watcher = hang_watcher.Watcher(
            run=folder,
            hang_after_s=hang_after_s,
            diagnose=self.diagnose,
            say=self.said.append,
            on_hang=lambda: self.kept.append(len(self.said)),
            clock=lambda: self.now_s,
        )

    def diagnose(self, run: Path) -> hang_watcher.StallVerdict:
        assert run == self.folder
        self.num_diagnoses += 1
        return self.verdict

    def start(self) -> None:
        for rank in self.heads:
            write_rank(self.folder, RankBuilder(rank, world_size=2))

    def segment(self, rank: int, number: int = 0) -> Path:
        return self.folder / paths.rank_folder_name(rank, 0) / paths.segment_name(number)

    def move(self, rank: int, *, number: int = 0) -> None:
        """Let a rank record one more event."""
        self.heads[rank] += 1
        self.write(rank, HEAD, self.heads[rank], number=number)

    def write(self, rank: int, at: int, value: int, *, number: int = 0) -> None:
        with self.segment(rank, number).open("r+b") as file:
            file.seek(at)
            file.write(value.to_bytes(8 if at == HEAD else 4, "little"))

    def wait(self, seconds: float) -> None:
        """Let time pass, ticked every half second as by the launcher."""
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            self.watcher.tick()


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[list[int | str]]:
    """Stand in for the stacks of processes that do not exist; give the pids asked for, and `native` behind them."""
    asked: list[list[int | str]] = []

    def note(
        pids: list[int], _: Path, *, native: bool, starting: dict[int, int], is_current: Callable[[], bool]
    ) -> None:
        assert starting == {}
        asked.append([*sorted(pids), *["native"] * native])
        is_current()

    monkeypatch.setattr(stack_sampler, "sample", note)
    return asked


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, object]]:
    """Stand in for the launchers in a rendezvous: none at first."""
    waits: dict[int, dict[str, object]] = {}
    monkeypatch.setattr(rendezvous_waits, "find_waits", lambda _: {pid: dict(wait) for pid, wait in waits.items()})
    monkeypatch.setattr(rendezvous_waits.RendezvousWatch, "write", lambda _: None)
    return waits


@pytest.fixture
def job(tmp_path: Path, sampled: list[list[int | str]], launchers: dict[int, dict[str, object]]) -> Job:
    """Give a job that is alarmed of after 10 s."""
    assert sampled == []
    assert launchers == {}
    return Job(tmp_path, 10.0)


def test_no_alarm_while_any_rank_moves(job: Job) -> None:
    job.start()
    for _ in range(10):
        job.move(1)
        job.wait(9.5)
    assert (job.said, job.num_diagnoses, job.watcher.hang) == ([], 0, None)


def test_alarm_once_the_time_has_passed_and_not_before(job: Job, sampled: list[list[int | str]]) -> None:
    job.start()
    job.wait(10.0)
    assert job.num_diagnoses == 0
    job.wait(1.0)
    assert job.said == ["no rank has made progress for 10 s\nrank 1 never called all_reduce"]
    assert sampled == [[10_000, 10_001]]
    assert job.watcher.hang is job.verdict
    assert job.watcher.hang_detected_ns is not None


def test_the_program_is_kept_once_for_each_hang_after_its_report(job: Job) -> None:
    job.start()
    job.wait(11.0)
    job.wait(10.0)
    assert (len(job.said), job.kept) == (1, [1])
    job.move(1)
    job.wait(1.0)
    job.wait(11.0)
    assert job.kept == [1, 1]


def test_a_rank_that_goes_on_while_stacks_are_taken_ends_the_stall(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[bool]()

    def take(*_: object, is_current: Callable[[], bool], **__: object) -> None:
        if len(kept) == 1:
            job.move(1)
        kept.append(is_current())

    monkeypatch.setattr(stack_sampler, "sample", take)
    job.verdict = hang_watcher.StallVerdict(is_hang=False, text="rank 1 writes a checkpoint")
    job.start()
    job.wait(20.0)
    assert (kept, job.num_diagnoses) == ([True, False], 1)
    job.wait(2.0)
    assert (len(kept), job.num_diagnoses) == (2, 1)  # it has begun to wait anew


def test_native_stacks_of_a_job_with_a_device_are_taken_once_the_hang_is_reported(
    job: Job, sampled: list[list[int | str]]
) -> None:
    job.start()
    strings = job.folder / paths.rank_folder_name(1, 0) / paths.STRINGS
    strings.write_bytes(strings.read_bytes() + b'{"k":"stream","id":1,"device":"cuda","index":0,"stream":0}\n')
    job.wait(11.0)
    assert (len(job.said), sampled) == (1, [[10_000, 10_001], [10_000, 10_001, "native"]])
    job.wait(10.0)
    assert sampled[2:] == [[10_000, 10_001, "native"]]  # the stacks that are kept are never poorer than before


def test_no_alarm_once_every_rank_has_ended_and_its_launcher_lingers(job: Job) -> None:
    job.start()
    folder = job.folder / paths.node_folder_name(writer.host_name())
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"pid": 10_000 + rank, "status": -15, "t_ns": 1}) + "\n" for rank in (0, 1)]
    (folder / paths.EXITS).write_text(rows[0], encoding="utf-8")
    job.wait(11.0)
    assert job.num_diagnoses == 1, "rank 1 is still there"
    (folder / paths.EXITS).write_text("".join(rows), encoding="utf-8")
    job.wait(30.0)
    assert job.num_diagnoses == 1


def test_the_same_verdict_is_reported_once(job: Job) -> None:
    job.start()
    job.wait(100.0)
    first = job.watcher.hang_detected_ns
    assert (len(job.said), job.num_diagnoses) == (1, 4), "after 10, 20, 40 and 80 s"
    job.verdict = hang_watcher.StallVerdict(is_hang=True, text="with other figures", headline=job.verdict.text)
    job.wait(100.0)
    assert (len(job.said), job.num_diagnoses) == (1, 5)
    assert job.watcher.hang_detected_ns == first
    job.move(0)
    job.wait(100.0)
    assert len(job.said) == 1
    assert job.num_diagnoses == 9


def test_of_several_launchers_of_one_run_one_tells_and_all_know(job: Job) -> None:
    job.start()
    other = hang_watcher.Watcher(
        run=job.folder, hang_after_s=10.0, diagnose=job.diagnose, say=job.said.append, clock=lambda: job.now_s
    )
    for _ in range(40):
        job.wait(0.5)
        other.tick()
    assert len(job.said) == 1
    assert (job.watcher.hang, other.hang) == (job.verdict, job.verdict)


def test_a_hang_that_comes_to_another_verdict_without_any_progress_is_reported_again(job: Job) -> None:
    job.start()
    job.wait(12.0)
    job.verdict = hang_watcher.StallVerdict(is_hang=True, text="rank 1 was killed")
    job.wait(10.0)
    assert [text.splitlines()[1] for text in job.said] == ["rank 1 never called all_reduce", "rank 1 was killed"]


def test_a_job_with_long_pauses_of_its_own_may_stand_still_for_ten_of_them(job: Job) -> None:
    job.start()
    for _ in range(MIN_PAUSES + 1):
        job.move(0)
        job.wait(4.0)
    job.wait(30.0)
    assert job.num_diagnoses == 0
    job.wait(6.0)
    assert job.said == ["no rank has made progress for 35 s\nrank 1 never called all_reduce"]


def test_short_pauses_and_a_few_long_ones_leave_the_alarm_as_it_was_asked_for(job: Job) -> None:
    job.start()
    for number in range(40):
        job.move(0)
        job.wait(9.0 if number % 5 == 0 else 1.0)
    assert job.said == []
    job.wait(10.0)
    assert len(job.said) == 1


def test_another_verdict_is_reported_as_well(job: Job) -> None:
    job.start()
    job.wait(20.0)
    job.move(0)
    job.wait(1.0)
    assert job.watcher.hang is None, "progress ends the hang"
    job.verdict = hang_watcher.StallVerdict(is_hang=True, text="rank 0 waits in send")
    job.wait(20.0)
    assert [text.splitlines()[1] for text in job.said] == ["rank 1 never called all_reduce", "rank 0 waits in send"]


def test_ranks_that_only_compute_for_long_raise_no_alarm_and_are_looked_at_again(job: Job) -> None:
    job.start()
    computing = hang_watcher.StallVerdict(is_hang=False, text="")
    hang, job.verdict = job.verdict, computing
    job.wait(30.0)
    assert (job.said, job.watcher.hang, job.watcher.hang_detected_ns) == ([], None, None)
    assert 5 <= job.num_diagnoses <= 9, "every quarter of the time"
    job.verdict = hang
    job.wait(3.0)
    assert len(job.said) == 1


def test_a_first_step_gets_longer(job: Job) -> None:
    job.start()
    job.verdict = hang_watcher.StallVerdict(is_hang=True, text="rank 1 does not come", is_early=True)
    job.wait(49.0)
    assert (job.said, job.watcher.hang) == ([], None)
    job.wait(5.0)
    assert len(job.said) == 1
    assert job.watcher.hang is job.verdict


def test_what_stalls_without_a_known_reason_is_reported_once_and_is_no_hang(job: Job) -> None:
    job.start()
    job.verdict = hang_watcher.StallVerdict(is_hang=False, text="every rank sleeps", is_unclear=True)
    job.wait(60.0)
    assert [text.splitlines()[1] for text in job.said] == ["every rank sleeps"]
    assert (job.watcher.hang, job.watcher.hang_detected_ns) == (None, None)


def test_zero_seconds_never_raise_an_alarm(tmp_path: Path, sampled: list[list[int | str]]) -> None:
    job = Job(tmp_path, 0.0)
    job.start()
    job.wait(500.0)
    assert (job.said, job.num_diagnoses, sampled) == ([], 0, [])


def test_job_whose_ranks_have_not_started_is_no_hang(job: Job) -> None:
    job.wait(500.0)
    assert (job.said, job.num_diagnoses) == ([], 0)
    job.start()
    job.wait(9.5)
    assert job.num_diagnoses == 0


def test_rendezvous_that_does_not_complete_is_a_hang_from_its_own_beginning(
    job: Job, launchers: dict[int, dict[str, object]]
) -> None:
    job.wait(100.0)  # the launcher fetches data
    launchers[7] = {}
    job.wait(9.5)
    assert (job.said, job.watcher.hang) == ([], None)
    job.wait(3.0)  # a quarter of the threshold: it is looked at no more often
    assert job.watcher.hang is not None
    assert job.said == ["no rank has started, after 10 s in a rendezvous\nrank 1 never called all_reduce"]
    assert job.watcher.may_yet_start  # nodes start at different times: no reason yet to stop the job
    job.wait(45.0)
    assert not job.watcher.may_yet_start
    job.wait(55.0)
    assert len(job.said) == 1
    assert job.num_diagnoses < 10
    launchers.clear()
    job.wait(3.0)
    assert job.watcher.hang is None


def test_rendezvous_that_completes_before_the_threshold_is_no_hang(
    job: Job, launchers: dict[int, dict[str, object]]
) -> None:
    launchers[7] = {}
    job.wait(9.0)
    job.start()
    job.wait(9.0)
    assert (job.said, job.num_diagnoses) == ([], 0)


def test_progress_is_seen_although_a_spare_segment_is_the_newest(job: Job) -> None:
    job.start()
    spare = job.segment(0, 1)
    data = bytearray(job.segment(0).read_bytes())
    data[schema.HEADER_OFFSET["segment"]] = 1
    spare.write_bytes(data)
    for _ in range(5):
        job.move(0)
        job.wait(8.0)
    job.move(0, number=1)
    job.wait(8.0)
    assert job.num_diagnoses == 0
    assert sorted(job.watcher.pids) == [10_000, 10_001]


@pytest.mark.parametrize("content", [b"", b"short"])
def test_segment_that_is_being_created_is_nothing_to_stumble_over(job: Job, content: bytes) -> None:
    job.start()
    job.segment(1).write_bytes(content)
    job.segment(0).unlink()
    job.wait(30.0)
    assert len(job.said) == 1


def test_full_disk_is_reported_once_whatever_the_number_of_ranks(job: Job) -> None:
    job.start()
    job.wait(1.0)
    assert not job.watcher.truncated
    for rank in (0, 1):
        job.write(rank, MARKS, schema.MARK["truncated"])
        job.wait(1.0)
    assert job.watcher.truncated
    assert [text.split(":")[0] for text in job.said] == ["the disk is full or not writable"]


def test_full_disk_right_before_the_end_is_reported(job: Job) -> None:
    job.start()
    job.wait(1.0)
    job.write(0, MARKS, schema.MARK["truncated"])
    job.watcher.poll_last()
    assert job.watcher.truncated
    assert len(job.said) == 1


def test_run_that_was_deleted_meanwhile_is_survived_by_the_last_poll(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.folder.rmdir()
    job.watcher.poll_last()
    assert "the last poll of the job's records failed: FileNotFoundError" in capsys.readouterr().err
