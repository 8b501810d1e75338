"""File systems: a network, memory, little space, limits and quotas are told before the job starts, and never end it."""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtprof.errors import DiskFullError, OutputError
from dtprof.launch import hang_watcher, job_launch, run_directory, storage
from dtprof.launch.storage import Storage
from dtprof.records import paths
from dtprof.records.nodes.node_reader import read_node_samples
from dtprof.records.reader import open_run
from tests import jobs

MIB = 1024 * 1024
LINE = "36 35 98:0 / {mount} rw,noatime shared:1 - {kind} server:/export rw\n"


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a file that stands for the mounts of this host: a local disk, and nothing else yet."""
    file = tmp_path / "mountinfo"
    file.write_text(LINE.format(mount="/", kind="ext4"))
    monkeypatch.setattr(storage, "MOUNTS", file)
    return file


def mount(mounts: Path, place: Path, kind: str) -> None:
    with mounts.open("a") as stream:
        stream.write(LINE.format(mount=str(place).replace(" ", "\\040"), kind=kind))


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [
        ("nfs", True),
        ("nfs4", True),
        ("cifs", True),
        ("lustre", True),
        ("9p", False),  # the root of some containers, and mapped memory works
        ("fuse.fuse-overlayfs", False),
        ("fuse.sshfs", True),
        ("fuseblk", False),
        ("ext4", False),
        ("xfs", False),
        ("overlay", False),
        ("tmpfs", False),
    ],
)
def test_network_file_systems_are_known_by_their_type(
    tmp_path: Path, mounts: Path, kind: str, is_network: bool
) -> None:
    (tmp_path / "a b").mkdir()
    mount(mounts, tmp_path / "a b", kind)
    assert storage.examine(tmp_path / "a b" / "not" / "yet").is_network == is_network
    assert storage.examine(tmp_path / "a b").kind == kind
    assert storage.examine(tmp_path).kind == "ext4", "the mount is not over its parent"


def test_the_innermost_and_newest_mount_counts(tmp_path: Path, mounts: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    mount(mounts, inner, "nfs4")
    mount(mounts, tmp_path, "xfs")
    assert storage.examine(inner).kind == "nfs4"
    mount(mounts, inner, "tmpfs")
    assert storage.examine(inner).is_memory
    mounts.write_text("rubbish\n")
    assert storage.examine(inner).kind == ""


def test_this_machines_own_mounts_can_be_read(tmp_path: Path) -> None:
    found = storage.examine(tmp_path)
    assert found.kind
    assert abs(found.free_bytes - shutil.disk_usage(tmp_path).free) < 1024 * MIB


@pytest.mark.parametrize(
    ("kind", "free_mib", "told"),
    [
        ("ext4", 1000, None),
        ("tmpfs", 1000, None),
        ("tmpfs", 63, "lies in memory (tmpfs, 63 MiB free), which the records take from the job; give"),
        ("ext4", 63, "only 63 MiB are free at"),
    ],
)
def test_place_without_much_room_is_reported(kind: str, free_mib: int, told: str | None) -> None:
    said = storage.remark(Path("/run"), Storage(kind=kind, free_bytes=free_mib * MIB), max_log_mb=256)
    assert (said is None) == (told is None)
    assert (told or "") in (said or "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_and_used_up_quota_do_not_keep_a_job_from_running(number: int) -> None:
    error = run_directory.output_error(Path("/run"), OSError(number, os.strerror(number)))
    assert isinstance(error, DiskFullError)
    assert os.strerror(number) in str(error)
    other = run_directory.output_error(Path("/run"), OSError(errno.EROFS, "Read-only file system"))
    assert isinstance(other, OutputError)
    assert not isinstance(other, DiskFullError)


def test_no_local_disk_is_no_place(tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTPROF_LOCAL_DIR", str(tmp_path))
    mount(mounts, tmp_path, "nfs4")
    assert storage.local_place(tmp_path / "run") is None
    monkeypatch.setenv("DTPROF_LOCAL_DIR", str(tmp_path / "missing" / "folder"))
    mounts.write_text(LINE.format(mount="/", kind="ext4"))
    assert storage.local_place(tmp_path / "run") is None


def test_what_two_launchers_of_a_host_bring_home_is_joined(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in range(2):
        place = tmp_path / f"local-{number}"
        (place / "rank-00001.0").mkdir(parents=True)
        (place / "rank-00001.0" / "events.00000").write_text(str(number))
        (place / "node-a").mkdir()
        (place / "node-a" / "exits.jsonl").write_text(f"{number}\n")
        storage.bring_home(place, run)
        assert not place.exists()
    assert (run / "node-a" / "exits.jsonl").read_text() == "0\n1\n"
    assert [(run / f"rank-00001.{n}" / "events.00000").read_text() for n in range(2)] == ["0", "1"]


def settings(output: Path) -> job_launch.JobSettings:
    return job_launch.JobSettings(
        output=output, force=False, join=False, native=True, max_log_mb=64, hang_after_s=60, stop_on_hang=False
    )


def no_hang(_: Path) -> hang_watcher.StallVerdict:
    return hang_watcher.StallVerdict(is_hang=False, text="")


@pytest.fixture
def on_network(tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that is taken for one on NFS, beside a local one."""
    for name in ("network", "local"):
        (tmp_path / name).mkdir()
    mount(mounts, tmp_path / "network", "nfs4")
    monkeypatch.setenv("DTPROF_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path / "network"


@pytest.mark.jobs
def test_run_on_a_network_is_written_locally_and_moved_at_the_end(on_network: Path, tmp_path: Path) -> None:
    program = f"""
import os, pathlib, subprocess, sys
here = pathlib.Path(os.environ["DTPROF_RUN_DIR"])
assert here.parent == pathlib.Path({str(tmp_path / "local")!r}), here
assert not list(pathlib.Path({str(on_network)!r}).glob("run/rank-*"))
sys.argv = ["many", "10"]
exec(open({str(jobs.PROGRAMS / "many_operations.py")!r}).read())
"""
    end = job_launch.run_job([sys.executable, "-c", program], settings(on_network / "run"), no_hang)
    assert (end.status, end.run) == (0, on_network / "run")
    opened = open_run(on_network / "run")
    assert opened.ranks == [0]
    assert len(opened.load(0).operations) == 10
    assert opened.load(0).closed
    assert len(opened.processes) == 1
    assert read_node_samples(on_network / "run")
    assert any("lies on a network (nfs4): records were written to" in note for note in opened.manifest.notes)
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.jobs
def test_run_that_cannot_be_moved_is_said_to_lie_where_it_is(
    on_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(storage, "_add", refuse)
    end = job_launch.run_job(["sh", "-c", "exit 7"], settings(on_network / "run"), no_hang)
    assert end.status == 7
    (left,) = (tmp_path / "local").iterdir()
    said = capfd.readouterr().err
    told = f"records could not be moved to {on_network}/run (Disk quota exceeded): what is missing there is in {left}"
    assert told in said
    assert list(left.rglob("*.jsonl"))


HUNGRY = """
import os, resource, sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2))
taken = []
try:
    while True: taken.append(os.dup(0))
except OSError as error:
    print(error.strerror)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward(); optimizer.step()
[os.close(one) for one in taken]
print("trained")
"""


@pytest.mark.jobs
def test_rank_without_a_file_descriptor_left_is_not_recorded_and_trains_on(tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", sys.executable, "-c", HUNGRY]
    done = jobs.recorded(tmp_path / "run", limited)
    assert done.stdout == "Too many open files\ntrained\n"
    said = [line for line in done.stderr.splitlines() if line.startswith("dtprof: this rank is not recorded")]
    assert len(said) == 1, done.stderr
    assert "Too many open files" in said[0]


@pytest.mark.jobs
def test_small_file_system_in_memory_is_reported_before_the_job_starts(tmp_path: Path) -> None:
    mounted = tmp_path / "memory"
    mounted.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "none", str(mounted)]).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        done = jobs.recorded(mounted / "run", [sys.executable, str(jobs.PROGRAMS / "many_operations.py"), "10"])
        first = done.stderr.splitlines()[0]
        assert first.startswith(f"dtprof: {mounted}/run lies in memory (tmpfs, ")
        opened = open_run(mounted / "run")
        assert len(opened.load(0).operations) == 10
        assert opened.manifest.notes[0].startswith(f"{mounted}/run lies in memory")
        assert (mounted / "run" / paths.MANIFEST).exists()
    finally:
        for _ in range(50):
            if subprocess.run(["umount", str(mounted)]).returncode == 0:
                break
            time.sleep(0.1)
