"""Several launchers, one run: joined where it is the same running job, refused where it is not."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from dtprof import __version__
from dtprof.errors import OutputError, UsageError
from dtprof.launch import clock_probes, run_directory, run_joining
from dtprof.records import paths
from dtprof.records.reader import open_run
from tests import jobs


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the person who runs the tests out of them."""
    names = [name for names in run_joining.SAME_JOB for name in names]
    for name in [name for name in os.environ if name.startswith("DTPROF_") or name in names]:
        monkeypatch.delenv(name)


def enter(run: Path, *, force: bool, join: bool) -> bool:
    """Enter a run as the launcher of a job that the environment names."""
    return run_joining.enter(run, force=force, join=join, job=run_joining.job_key(()))


def created(run: Path) -> Path:
    """Create a run as a launcher of a job of two hosts does."""
    assert enter(run, force=False, join=False)
    run_directory.RunManifest(run, ["train"], {}, job=run_joining.job_key(()))
    return run


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the environment in which a job of several hosts is often started."""
    monkeypatch.setenv("MASTER_ADDR", "host-a")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.usefixtures("rendezvous")
def test_launcher_of_the_same_job_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = created(tmp_path / "run")
    monkeypatch.setenv("DTPROF_HOST", "host-b")
    assert not enter(run, force=False, join=False)
    run_directory.JoinedLauncher(run, ["train"])
    assert (run / "node-host-b").is_dir()
    assert "host-b" in run_directory.hosts_of(run)


def test_a_launcher_of_another_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = created(tmp_path / "run")
    assert run_directory.version_remark(run) is None
    monkeypatch.setattr(run_directory, "__version__", "9.9")
    said = f"this launcher is of dtprof 9.9, the run that it joins of {__version__}: install one version"
    assert run_directory.version_remark(run) == said
    (run / paths.MANIFEST).write_text("{")
    assert run_directory.version_remark(run) is None


@pytest.mark.usefixtures("rendezvous")
def test_another_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = created(tmp_path / "run")
    monkeypatch.setenv("MASTER_PORT", "29501")
    with pytest.raises(OutputError, match=r"holds the run of another job .*29500; this one is .*29501.*--join"):
        enter(run, force=False, join=False)
    assert not enter(run, force=False, join=True), "unless told so"


@pytest.mark.usefixtures("rendezvous")
def test_a_launcher_that_has_just_created_the_run_is_given_time_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = created(tmp_path / "run")
    document = json.loads((run / paths.MANIFEST).read_text())
    (run / paths.MANIFEST).write_text(json.dumps(document | {"launcher_start_ticks": 1}))
    responders: list[clock_probes.Responder | None] = []
    monkeypatch.setattr(run_joining, "ANSWER_WAIT_S", 60.0)
    monkeypatch.setattr(run_joining.time, "sleep", lambda _: responders.append(clock_probes.serve(run)))
    assert not enter(run, force=False, join=False)
    assert responders
    for responder in responders:
        assert responder is not None
        responder.close()


@pytest.mark.usefixtures("rendezvous")
def test_run_that_has_ended_or_whose_launcher_is_gone_is_refused(tmp_path: Path) -> None:
    run = created(tmp_path / "run")
    document = json.loads((run / paths.MANIFEST).read_text())
    (run / paths.MANIFEST).write_text(json.dumps(document | {"launcher_start_ticks": 1, "started_realtime_ns": 1}))
    with pytest.raises(OutputError, match="whose launcher does not answer"):
        enter(run, force=False, join=False)
    responder = clock_probes.serve(run)
    assert responder is not None
    try:
        assert not enter(run, force=False, join=False), "another host's launcher answers by its clock"
    finally:
        responder.close()
    document["ended_realtime_ns"] = 5
    (run / paths.MANIFEST).write_text(json.dumps(document))
    for join in (False, True):
        with pytest.raises(OutputError, match="holds a run that has ended"):
            enter(run, force=False, join=join)
    assert enter(run, force=True, join=False), "force replaces it"


@pytest.mark.usefixtures("rendezvous")
def test_force_replaces_no_run_that_goes_on_and_joins_that_of_its_own_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = created(tmp_path / "run")
    monkeypatch.setenv("DTPROF_HOST", "host-b")
    assert not enter(run, force=True, join=False)
    monkeypatch.setenv("MASTER_PORT", "29501")
    with pytest.raises(
        OutputError, match=rf"is still recorded \(by process {os.getpid()}\); --force replaces what has"
    ):
        enter(run, force=True, join=False)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(OutputError, match="end that job, or give another directory"):
        enter(run, force=True, join=False)
    assert (run / "run.json").exists()


def test_without_knowledge_of_the_job_a_second_launcher_is_refused_as_ever(tmp_path: Path) -> None:
    run = created(tmp_path / "run")
    with pytest.raises(OutputError, match="holds a run that has not ended; give another directory, --join"):
        enter(run, force=False, join=False)
    with pytest.raises(UsageError, match="--join and --force exclude each other"):
        enter(run, force=True, join=True)


def test_directory_of_something_else_is_not_joined(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OutputError, match="is not empty"):
        enter(tmp_path, force=False, join=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_of_launchers_that_start_together_one_creates_the_run(tmp_path: Path) -> None:
    run, created_by = tmp_path / "run", []
    barrier = threading.Barrier(8)

    def launch() -> None:
        barrier.wait()
        is_creator = enter(run, force=False, join=True)
        created_by.append(is_creator)
        if is_creator:
            run_directory.RunManifest(run, ["train"], {})

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created_by) == [False] * 7 + [True]


def test_launcher_that_died_before_it_wrote_the_manifest_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert enter(tmp_path / "run", force=False, join=True)
    monkeypatch.setattr(run_joining, "MANIFEST_WAIT_S", 0.05)
    with pytest.raises(OutputError, match=r"was taken by another launcher .* run\.json is not there"):
        enter(tmp_path / "run", force=False, join=True)


@pytest.mark.jobs
def test_two_launchers_record_one_job_into_one_run(tmp_path: Path) -> None:
    """One job of two ranks, a `dtprof run` for each as on two hosts; the second one's clock is measured."""
    run = tmp_path / "run"
    program = [sys.executable, str(jobs.PROGRAMS / "records_itself.py")]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_000 + os.getpid() % 1000), "WORLD_SIZE": "2"}
    command = [*jobs.DTPROF, "run", "-o", str(run), "--", *program]
    first = common | {"RANK": "0", "DTPROF_HOST": "host-a"}
    second = common | {"RANK": "1", "DTPROF_HOST": "host-b"}
    with jobs.started(command, tmp_path, env=first) as one:
        one.wait_until(lambda: (run / paths.CLOCK_ADDRESS).exists())
        with jobs.started(command, tmp_path, env=second) as two:
            assert two.wait() == 0, two.stderr
        assert one.wait() == 0, one.stderr
    opened = open_run(run)
    assert (opened.ranks, opened.problems) == ([0, 1], ())
    assert [tables.host for tables in opened.load_all()] == ["host-a", "host-b"]
    assert opened.manifest.hosts == ("host-a", "host-b")
    assert opened.manifest.exit_status == 0
    launcher = json.loads(next((run / "node-host-b").glob("launcher-*.json")).read_text())
    assert (launcher["exit_status"], launcher["host"]) == (0, "host-b")
    owner, *measured = map(json.loads, (run / "node-host-b" / paths.CLOCK).read_text().splitlines())
    assert owner["host"] == "host-b"
    assert measured
    for row in measured:  # both are this machine: the true offset is 0
        assert abs(row["offset_ns"]) <= row["error_ns"]
    assert set(opened.node_samples()) == {"host-a", "host-b"}
    assert {name: clock.error_at(0) for name, clock in opened.host_clocks().items()} == {"host-a": 0, "host-b": 0}


@pytest.mark.parametrize(
    ("command", "environment", "expected"),
    [
        ("torchrun --nnodes 2 --rdzv-endpoint a:1 --rdzv-id 5 train.py", {}, "rendezvous=a:1,id=5"),
        ("torchrun --nnodes 1:2 --rdzv-endpoint a:1 train.py", {}, "rendezvous=a:1,id="),
        ("python -m torch.distributed.run --nnodes 2 --master-addr a --master-port 7 t.py", {}, "rendezvous=a:7,id="),
        # One host: nobody joins.
        ("torchrun --rdzv-endpoint a:1 train.py", {}, None),
        # Nobody says where they meet.
        ("torchrun --nnodes 2 train.py", {}, None),
        # A program has options of its own.
        ("python train.py --nnodes 2 --rdzv-endpoint a:1", {}, None),
        # What a scheduler or Open MPI sets comes first.
        (
            "torchrun --nnodes 2 --rdzv-endpoint a:1 t.py",
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            "SLURM_JOB_ID=7,SLURM_STEP_ID=0",
        ),
        ("python train.py", {"PMIX_NAMESPACE": "prterun-a-12@1"}, "PMIX_NAMESPACE=prterun-a-12@1"),
        ("python train.py", {"MASTER_ADDR": "a"}, None),
    ],
)
def test_job_is_known_by_its_scheduler_else_by_its_rendezvous(
    command: str, environment: dict[str, str], expected: str | None
) -> None:
    assert run_joining.job_key(command.split(), environment) == expected
