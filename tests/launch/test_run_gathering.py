"""`dtprof gather`: folders of the nodes of one job become one run, and those of several jobs do not."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.cli.main import main
from dtprof.records import paths, writer
from dtprof.records.reader import open_run
from tests.synthetic import HostClock, Job, generate

OFFSET_NS = 5_000_000_000


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Return a folder with `node0` and `node1`: what two launchers wrote that saw no common folder."""
    job = Job(
        dp=4,
        tp=2,
        steps=12,
        slow={5: 1.4},
        ranks_per_host=4,
        clocks={1: HostClock(offset_ns=OFFSET_NS, drift_ppm=20.0)},
    )
    generate(tmp_path / "whole", job)
    for host in (0, 1):
        node = tmp_path / f"node{host}"
        node.mkdir()
        for rank in range(4 * host, 4 * host + 4):
            name = paths.rank_folder_name(rank, 0)
            shutil.move(tmp_path / "whole" / name, node / name)
        folder = node / f"node-host-{host}"
        shutil.move(tmp_path / "whole" / f"node-host-{host}", folder)
        owner = {"host": f"host-{host}", "boot_id": f"boot-{host}", "is_reference": True}
        (folder / paths.CLOCK).write_text(json.dumps(owner) + "\n", encoding="utf-8")
        manifest = json.loads((tmp_path / "whole" / paths.MANIFEST).read_text(encoding="utf-8"))
        manifest |= {
            "hosts": [f"host-{host}"],
            "command": ["torchrun", "--nnodes", "2", "--node-rank", str(host), "train.py"],
            "launcher_pid": 70 + host,
            "exit_status": host,
            "notes": [f"note {host}"],
        }
        (node / paths.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(tmp_path / "whole")
    return tmp_path


def change(node: Path, **fields: object) -> None:
    """Change fields of the manifest of a node."""
    file = node / paths.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_nodes_become_one_run_with_one_clock(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = nodes / "run"
    assert main(["gather", str(nodes / "node1"), str(nodes / "node0"), "-o", str(whole)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{whole}\n"
    assert said.err == f"next: dtprof summary {whole}\n"
    opened = open_run(whole)
    assert opened.ranks == list(range(8))
    assert opened.manifest.hosts == ("host-0", "host-1")
    assert opened.manifest.command[4] == "0", "the manifest is that of rank 0's launcher"
    assert opened.manifest.exit_status == 1, "the job failed where any launcher saw it fail"
    assert opened.manifest.notes == ("host-0: note 0", "host-1: note 1", "gathered from the folders of 2 launchers")
    joined = json.loads((whole / "node-host-1" / "launcher-71.json").read_text(encoding="utf-8"))
    assert joined["host"] == "host-1"
    assert joined["exit_status"] == 1
    summary = summarise(opened)
    assert summary.complete
    (other,) = (clock for clock in summary.clocks if clock.host == "host-1")
    assert summary.clock_error_ns is not None
    assert other.offset_ns is not None
    assert abs(other.offset_ns + OFFSET_NS) < 2_000_000, "20 millionths over some 100 ms, and the error"
    assert [straggler.rank for straggler in summary.stragglers][:1] == [5]
    assert main(["report", str(whole)]) == 0


def test_the_verdict_is_on_the_job_as_a_whole(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(nodes / "node1", exit_status=0)
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 0
    assert main(["diagnose", str(nodes / "run")]) == 1
    assert "Rank 5 is late in most steps" in capsys.readouterr().out


def test_diagnose_joins_what_the_nodes_wrote_and_leaves_nothing_behind(
    nodes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(nodes / "node0"), str(nodes / "node1")]
    before = sorted(nodes.rglob("*"))
    assert main(["diagnose", *given, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert sorted(nodes.rglob("*")) == before
    assert main(["gather", *given, "-o", str(nodes / "run")]) == 0
    capsys.readouterr()
    main(["diagnose", str(nodes / "run"), "--json"])
    assert said == json.loads(capsys.readouterr().out)
    assert said["ranks_seen"] == list(range(8))


def test_diagnose_does_not_join_a_run_that_is_still_recorded(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = nodes / "node1"
    change(node, ended_realtime_ns=0)
    # It answers once it runs: while a process is being started, /proc shows no environment of it.
    job = subprocess.Popen(
        ["/bin/sh", "-c", "echo up; read line"],
        env={"DTPROF_RUN_DIR": str(node)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "up\n"
        row = {"pid": job.pid, "boot_id": writer.boot_id(), "host": "host-1"}
        (node / "node-host-1" / paths.PROCESSES).write_text(json.dumps(row) + "\n", encoding="utf-8")
        assert main(["diagnose", str(nodes / "node0"), str(node)]) == 2
    finally:
        job.kill()
        job.communicate()
    said = capsys.readouterr().err
    assert "is still recorded" in said
    assert f"dtprof diagnose {node}" in said


def test_what_is_given_stays_as_it_is_and_records_are_not_copied(nodes: Path) -> None:
    before = {file: file.read_bytes() for file in nodes.rglob("*") if file.is_file()}
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 0
    assert {file: file.read_bytes() for file in before} == before
    segment = "rank-00000.0/events.00000"
    assert (nodes / "run" / segment).samefile(nodes / "node0" / segment)


def test_missing_ranks_are_named(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(nodes / "node1" / "rank-00006.0")
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 0
    assert "these ranks are in none of the folders: 6" in capsys.readouterr().err


def test_a_rank_that_is_there_twice_as_a_copy_is_taken_once(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(nodes / "node0" / "rank-00002.0", nodes / "node1" / "rank-00002.0")
    (nodes / "node1" / "rank-00002.0" / "events.00000").write_bytes(
        (nodes / "node0" / "rank-00002.0" / "events.00000").read_bytes()[:8192]
    )
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 0
    assert "ranks 2 were there twice, as copies; the longer one is taken" in capsys.readouterr().err
    assert open_run(nodes / "run").load(2).problems == ()


def test_offsets_to_another_reference_are_not_believed(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = nodes / "node1" / "node-host-1" / paths.CLOCK
    wrong = {"t_ns": 1, "offset_ns": 123.0, "error_ns": 1.0}
    file.write_text(file.read_text(encoding="utf-8") + json.dumps(wrong) + "\n", encoding="utf-8")
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 0
    assert "the clock of node-host-1 was not measured against" in capsys.readouterr().err
    assert "123.0" in file.read_text(encoding="utf-8"), "the original stays"
    assert set(open_run(nodes / "run").host_clocks()) == {"host-0"}


def test_hosts_of_one_name_keep_a_folder_each(nodes: Path) -> None:
    for host in (0, 1):
        (nodes / f"node{host}" / f"node-host-{host}").rename(nodes / f"node{host}" / "node-worker")
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 0
    assert sorted(folder.name for folder in (nodes / "run").glob("node-*")) == ["node-worker", "node-worker-2"]


def other_process(nodes: Path) -> None:
    shutil.move(nodes / "node1" / "rank-00004.0", nodes / "node1" / "rank-00001.0")


def later(nodes: Path) -> None:
    hour_ns = 3_600_000_000_000
    started = json.loads((nodes / "node0" / paths.MANIFEST).read_text(encoding="utf-8"))["started_realtime_ns"]
    change(nodes / "node1", started_realtime_ns=started + hour_ns, ended_realtime_ns=started + 2 * hour_ns)


def other_size(nodes: Path) -> None:
    shutil.rmtree(nodes / "node1")
    generate(nodes / "node1", Job(dp=2, steps=3))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda n: [change(n / f"node{i}", job=f"SLURM_JOB_ID={i}") for i in (0, 1)],
            "are of different jobs (SLURM_JOB_ID=0;",
        ),
        (lambda n: change(n / "node1", command=["torchrun", "--node-rank=1", "eval.py"]), "ran different commands"),
        (other_size, "differ in world size (8; 2)"),
        (later, "began 3,600 s after"),
        (other_process, "rank 1 is in"),
    ],
)
def test_folders_of_different_jobs_are_refused(
    nodes: Path, spoil: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(nodes)
    if spoil is other_size:
        change(nodes / "node1", command=["torchrun", "--nnodes", "2", "train.py"])
    assert main(["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "expected what the launchers of one job have written" in told
    assert not (nodes / "run").exists()


def test_commands_that_differ_for_a_reason_are_joined_with_force(nodes: Path) -> None:
    change(nodes / "node1", command=["bash", "start-node-1.sh"])
    command = ["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]
    assert main(command) == 2
    assert main([*command, "--force"]) == 0
    assert open_run(nodes / "run").ranks == list(range(8))


@pytest.mark.parametrize(
    ("given", "output", "said"),
    [
        (["node0", "node0"], "run", "was given twice"),
        (["node0", "gone"], "run", "does not exist"),
        (["node0", "node1"], "node1", "lie in each other"),
        (["node0", "node1"], "node1/run", "lie in each other"),
    ],
)
def test_folders_that_cannot_be_gathered_are_refused(
    nodes: Path, given: list[str], output: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["gather", *(str(nodes / name) for name in given), "-o", str(nodes / output), "--force"]
    assert main(command) == 2
    assert said in capsys.readouterr().err
    assert (nodes / "node1" / paths.MANIFEST).exists()


def test_a_run_that_is_there_is_replaced_only_with_force(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["gather", str(nodes / "node0"), str(nodes / "node1"), "-o", str(nodes / "run")]
    assert main(command) == 0
    assert main(command) == 2
    assert "--force to replace the run in it" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
