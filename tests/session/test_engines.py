"""Every executor gives the same results, to the last bit, and the same errors; none leaves a process behind."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.comparison.comparison_series import measure_run
from dtprof.analysis.run_summary import summarise
from dtprof.cli.engine_options import chosen_engine
from dtprof.cli.main import build_parser, main
from dtprof.errors import MissingDependencyError, NewerFormatError, SchedulerError, UsageError, WorkerLostError
from dtprof.job import rank_executor
from dtprof.job.rank_executor import THIS_PROCESS, Executor, map_tasks, share_out
from dtprof.records import schema
from dtprof.records.reader import Run, open_run
from dtprof.records.run_cache import MOST_BYTES
from dtprof.session.engines import IN_THIS_PROCESS, Engine, at_hand, executor_for, make_engine
from dtprof.session.executors import dask_cluster, worker_counts
from dtprof.session.executors.dask_cluster import DaskWorkers
from dtprof.session.executors.local_processes import LocalProcesses
from dtprof.session.executors.worker_counts import choose_jobs
from tests.synthetic import HostClock, Job, generate

FORKED_OR_NOT = pytest.mark.parametrize("forked", [False, True], ids=["fresh", "forked"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of 16 ranks on two hosts whose clocks differ, with a pipeline, a slow rank and a missing one."""
    job = Job(
        dp=4,
        tp=2,
        pp=2,
        steps=6,
        microbatches=4,
        jitter=0.05,
        slow={3: 1.3},
        lost=frozenset({9}),
        ranks_per_host=8,
        clocks={1: HostClock(offset_ns=7_000_000, drift_ppm=15.0)},
    )
    folder = tmp_path_factory.mktemp("runs") / "mine"
    generate(folder, job)
    return open_run(folder)


@pytest.fixture(autouse=True)
def parts_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_executor, "PARTS", 4)


@pytest.fixture(scope="module")
def dask() -> Iterator[DaskWorkers]:
    with DaskWorkers(scheduler="", num=2) as workers:
        yield workers


def results(run: Run, executor: Executor) -> tuple[str, str]:
    """Return all that is found, with every digit."""
    return repr(summarise(run, executor)), repr(sorted(measure_run(run, executor).estimates.items()))


def test_worker_processes_and_dask_give_the_same_results(run: Run, dask: DaskWorkers) -> None:
    expected = results(run, THIS_PROCESS)
    assert "blame" in expected[0]
    for forked in (False, True):
        with LocalProcesses(2, forked=forked) as processes:
            assert results(at_hand(run, processes), processes) == expected
    assert results(run, dask) == expected


def test_the_command_says_the_same_with_every_number_of_workers(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for jobs in ("1", "2"):
        assert main(["summary", str(run.path), "--json", "--jobs", jobs]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def damaged(folder: Path) -> Run:
    """Return a run of which one rank was written by a newer dtprof."""
    job = Job(dp=4, steps=3)
    generate(folder, job)
    segment = folder / "rank-00002.0" / "events.00000"
    header = bytearray(segment.read_bytes())
    offset = next(field.offset for field in schema.HEADER if field.name == "format_version")
    header[offset] = 99
    segment.write_bytes(header)
    return open_run(folder)


def test_an_error_of_a_worker_is_the_same_sentence(dask: DaskWorkers, tmp_path: Path) -> None:
    newer = damaged(tmp_path / "newer")
    with pytest.raises(NewerFormatError) as here:
        summarise(newer)
    with pytest.raises(NewerFormatError) as there, LocalProcesses(2, forked=True) as processes:
        summarise(newer, processes)
    with pytest.raises(NewerFormatError) as on_dask:
        summarise(newer, dask)
    assert str(here.value) == str(there.value) == str(on_dask.value)


def test_a_run_that_dask_workers_do_not_see_is_said_so(dask: DaskWorkers, tmp_path: Path) -> None:
    generate(tmp_path / "run", Job(dp=2, steps=3))
    opened = open_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(SchedulerError, match=r"a worker cannot read .*rank-0000"):
        summarise(opened, dask)


@dataclass(frozen=True, kw_only=True)
class LoadTask:
    records: Run
    until: Path | None = None  # a pipe that is read first


def load_rank(task: LoadTask) -> tuple[int, bool]:
    """Load the one rank of a task; return the process, and whether it had kept the rank."""
    (rank,) = task.records.folders
    assert task.records.cache is not None
    was_kept = rank in task.records.cache.tables
    task.records.load(rank)
    if task.until is not None:
        task.until.read_bytes()
    return os.getpid(), was_kept


def test_a_rank_is_read_once_by_the_worker_that_had_it_before(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with LocalProcesses(2, forked=True) as processes:
        kept = at_hand(run, processes)
        assert kept.cache is not None
        assert 2 * kept.cache.most_bytes == MOST_BYTES
        first, second = LoadTask(records=kept.part([0])), LoadTask(records=kept.part([1]))
        one, two = (processes.submit(load_rank, task).result() for task in (first, second))
        assert [one[1], two[1], one[0] == two[0]] == [False, False, False]
        again = [processes.submit(load_rank, task).result() for task in (second, first, first)]
        assert again == [(two[0], True), (one[0], True), (one[0], True)]
        busy = processes.submit(load_rank, replace(first, until=tmp_path / "pipe"))
        assert processes.submit(load_rank, first).result() == (two[0], False)
        (tmp_path / "pipe").write_bytes(b"")
        assert busy.result() == (one[0], True)


@FORKED_OR_NOT
def test_a_worker_that_is_killed_is_reported_with_the_way_out(*, forked: bool) -> None:
    with (
        pytest.raises(WorkerLostError, match=r"killed by signal 9.*--jobs 1"),
        LocalProcesses(2, forked=forked) as processes,
    ):
        list(map_tasks(processes, signal.raise_signal, [signal.SIGKILL]))


def test_a_lost_dask_worker_is_reported() -> None:
    # A cluster of its own: on a busy host Dask starts what was killed late, or never, and other tests would wait.
    with DaskWorkers(scheduler="", num=1) as workers, pytest.raises(WorkerLostError, match="Dask"):
        list(map_tasks(workers, signal.raise_signal, [signal.SIGKILL]))


def test_a_cluster_that_does_not_end_well_hides_no_error_of_the_work() -> None:
    def fail() -> None:
        raise AssertionError("can only join a started process")  # as Dask does of a worker that it starts again

    def work() -> None:
        with DaskWorkers(scheduler="", num=1) as workers:
            workers._ending.callback(fail)
            raise WorkerLostError("lost")

    with pytest.raises(WorkerLostError, match="lost"):
        work()


def test_when_no_dask_worker_is_left_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "LOOK_S", 0.1)
    with DaskWorkers(scheduler="", num=1) as workers:
        monkeypatch.setattr(dask_cluster, "WORKERS_S", 0)
        workers._client.retire_workers()
        with pytest.raises(WorkerLostError, match=r"all workers of Dask ended .* none came back"):
            list(map_tasks(workers, abs, [1]))


def test_work_longer_than_the_time_between_two_polls_is_waited_for(
    dask: DaskWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "LOOK_S", 0.01)
    assert list(map_tasks(dask, time.sleep, [0.3])) == [None]
    with pytest.raises(TimeoutError, match="of the work"):
        list(map_tasks(dask, time_out, ["of the work"]))


def test_scheduler_too_busy_to_say_who_works_is_waited_for(dask: DaskWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise TimeoutError("too busy")

    monkeypatch.setattr(dask_cluster, "LOOK_S", 0.01)
    monkeypatch.setattr(dask_cluster, "WORKERS_S", 0)
    monkeypatch.setattr(dask._client, "scheduler_info", refuse)
    assert list(map_tasks(dask, time.sleep, [0.3])) == [None]


def time_out(said: str) -> None:
    raise TimeoutError(said)


@FORKED_OR_NOT
@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_no_worker_outlives_the_work(error: type[BaseException] | None, *, forked: bool) -> None:
    pids: set[int] = set()

    def work() -> None:
        with LocalProcesses(2, forked=forked) as processes:
            pids.update(map_tasks(processes, os.getpgid, [0] * 20))  # each leads a group of its own
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    assert pids
    assert os.getpid() not in pids
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


OWN_COMMAND = Path("/proc/self/cmdline")
COMPLAINTS = Path("/proc/self/fd/2")


def test_only_a_command_forks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of others may have threads, gigabytes and devices, of which a copy is no good."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the cluster of other tests has some
    asked = make_engine("local", jobs="2")
    for engine, is_copy in ((asked, False), (replace(asked, owns_process=True), True)):
        with executor_for(engine, run) as executor:
            commands = set(map_tasks(executor, Path.read_bytes, [OWN_COMMAND] * 4))
        assert (commands == {OWN_COMMAND.read_bytes()}) is is_copy


def test_what_a_forked_worker_prints_is_no_output_of_the_command() -> None:
    with LocalProcesses(1, forked=True) as processes:
        printed, complained = map_tasks(processes, Path.readlink, [Path("/proc/self/fd/1"), COMPLAINTS])
    assert printed == complained == COMPLAINTS.readlink()


def test_a_command_with_threads_does_not_fork(run: Run) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with executor_for(Engine(jobs=2, owns_process=True), run) as executor:
            assert next(map_tasks(executor, Path.read_bytes, [OWN_COMMAND])) != OWN_COMMAND.read_bytes()
    finally:
        ended.set()
        thread.join()


def test_ranks_are_shared_out_in_order_whoever_works() -> None:
    several = LocalProcesses(2)
    assert [list(part) for part in share_out([0, 2, 5, 6, 7], several)] == [[0, 2], [5, 6], [7]]
    assert share_out([0, 2, 5, 6, 7], THIS_PROCESS) == [[0, 2, 5, 6, 7]]
    for executor in (several, THIS_PROCESS):
        assert share_out([], executor) == []
        parts = share_out(range(16_384), executor)
        assert {len(part) for part in parts} == {rank_executor.MOST_RANKS_A_PART}
        assert [rank for part in parts for rank in part] == list(range(16_384))


def test_workers_are_used_where_they_pay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_counts, "count_cores", lambda: 4)
    assert choose_jobs(run.folders) == 1
    monkeypatch.setattr(worker_counts, "PAYS_FROM_BYTES", 1_000_000)  # 15 ranks count as 1.5 million at least
    assert choose_jobs(run.folders) == 4
    monkeypatch.setattr(worker_counts, "count_cores", lambda: 64)
    assert choose_jobs(run.folders) == 15
    with executor_for(IN_THIS_PROCESS, run) as executor:
        assert executor is THIS_PROCESS


def test_engines_are_named_by_options_and_environment() -> None:
    assert make_engine("local") == Engine()
    assert make_engine("dask", jobs="3") == Engine(name="dask", jobs=3)
    assert make_engine("dask", scheduler="tcp://a:1") == Engine(name="dask", scheduler="tcp://a:1")
    assert make_engine("local", scheduler="tcp://a:1", asked_for=False) == Engine(), "from the environment"


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ([], {}, Engine()),
        ([], {"DTPROF_JOBS": "3"}, Engine(jobs=3)),
        (["--jobs", "2"], {"DTPROF_JOBS": "3"}, Engine(jobs=2)),
        ([], {"DTPROF_SCHEDULER": "tcp://a:1"}, Engine()),
        (["--engine", "dask"], {"DTPROF_SCHEDULER": "tcp://a:1"}, Engine(name="dask", scheduler="tcp://a:1")),
        ([], {"DTPROF_ENGINE": "dask", "DTPROF_JOBS": "3"}, Engine(name="dask", jobs=3)),
        (
            ["--scheduler", "tcp://a:1", "--engine=dask"],
            {"DTPROF_JOBS": "3"},
            Engine(name="dask", scheduler="tcp://a:1"),
        ),
    ],
)
def test_options_come_before_the_environment(
    options: list[str], environment: dict[str, str], expected: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chosen = chosen_engine(build_parser().parse_args(["summary", "RUN", *options]))
    assert chosen == replace(expected, owns_process=True)


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda: make_engine("spark"), r"--engine \(or DTPROF_ENGINE\) is 'spark'; expected local or dask"),
        (lambda: make_engine("local", jobs="0"), r"--jobs \(or DTPROF_JOBS\) is '0'; expected a number"),
        (lambda: make_engine("local", jobs="-1"), "is '-1'"),
        (lambda: make_engine("local", jobs="two"), "is 'two'"),
        (lambda: make_engine("local", scheduler="tcp://a:1"), "expected --engine dask beside it"),
        (lambda: make_engine("dask", scheduler="tcp://a:1", jobs="2"), "exclude each other"),
    ],
)
def test_engines_that_make_no_sense_are_refused(choose: Callable[[], Engine], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose()


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'dtprof\[dask\]'"):
        DaskWorkers(scheduler="", num=1)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://x", "gone.json"])
def test_a_scheduler_that_does_not_answer_is_said_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 1)
    with pytest.raises(SchedulerError, match=f"no Dask scheduler answers at {address}"):
        DaskWorkers(scheduler=address, num=0).__enter__()


def test_an_address_at_which_something_else_listens_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog takes the connection; nobody answers
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SchedulerError, match=f"no Dask scheduler answers at {address}"):
            DaskWorkers(scheduler=address, num=0).__enter__()


def test_the_address_of_a_worker_is_said_to_be_one(dask: DaskWorkers) -> None:
    worker = next(iter(dask._client.scheduler_info()["workers"]))
    with pytest.raises(SchedulerError, match=r"what answers is a (Worker|Nanny)"):
        DaskWorkers(scheduler=worker, num=0).__enter__()


def test_a_scheduler_without_workers_is_reported_with_the_command_that_starts_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed

    monkeypatch.setattr(dask_cluster, "WORKERS_S", 0.1)
    make: Any = distributed.LocalCluster
    with make(n_workers=0, host="127.0.0.1", dashboard_address=None) as cluster:
        with pytest.raises(SchedulerError, match=rf"no workers after .*: dask worker {cluster.scheduler_address}$"):
            DaskWorkers(scheduler=cluster.scheduler_address, num=0).__enter__()
        named = tmp_path / "scheduler.json"
        named.write_text(json.dumps({"address": cluster.scheduler_address}))
        with pytest.raises(SchedulerError, match=rf"no workers after .*: dask worker --scheduler-file {named}$"):
            DaskWorkers(scheduler=str(named), num=0).__enter__()


def test_a_program_in_which_dask_starts_no_worker_learns_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import distributed

    def fail(**_: object) -> None:
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr(distributed, "LocalCluster", fail)
    with pytest.raises(SchedulerError, match=r"Nanny failed to start.*below `if __name__ == '__main__':`"):
        DaskWorkers(scheduler="", num=1).__enter__()
