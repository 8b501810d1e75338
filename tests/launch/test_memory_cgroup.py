"""The control group that limits a job: either version, nested, in a container and outside of it."""

from pathlib import Path

import pytest

from dtprof.launch.memory_cgroup import VERSION_1, VERSION_2, Files, count_oom_kills, find_memory_cgroup

GIB = 1 << 30


def make_group(folder: Path, files: Files, *, limit: str | None, charged: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if limit is not None:
        (folder / files.limit).write_text(f"{limit}\n")
    (folder / files.charged).write_text(f"{charged}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file 77\ntotal_inactive_file {charged // 2}\n")


def find(tmp_path: Path, membership: str) -> tuple[str, int | None] | None:
    """Return the folder of the group that is found, and its limit."""
    file = tmp_path / "membership"
    file.write_text(membership)
    found = find_memory_cgroup(tmp_path / "mount", file)
    return None if found is None else (str(found.folder.relative_to(tmp_path / "mount")), found.limit_bytes())


@pytest.mark.parametrize("membership", ["0::/\n", "0::/docker/4711\n", "0::/../job\n"])
def test_a_container_sees_its_own_limit_whatever_its_group_is_called(tmp_path: Path, membership: str) -> None:
    make_group(tmp_path / "mount", VERSION_2, limit=str(8 * GIB), charged=GIB)
    assert find(tmp_path, membership) == (".", 8 * GIB)


def test_of_nested_groups_the_smallest_limit_counts(tmp_path: Path) -> None:
    top = tmp_path / "mount"
    for path, limit in (("slurm", "max"), ("slurm/job_1", str(4 * GIB)), ("slurm/job_1/step_0", "max")):
        make_group(top / path, VERSION_2, limit=limit, charged=GIB)
    assert find(tmp_path, "0::/slurm/job_1/step_0\n") == ("slurm/job_1", 4 * GIB)
    make_group(top / "slurm/job_1/step_0", VERSION_2, limit=str(2 * GIB), charged=GIB)
    assert find(tmp_path, "0::/slurm/job_1/step_0\n") == ("slurm/job_1/step_0", 2 * GIB)
    make_group(top / "other", VERSION_2, limit="1", charged=GIB)
    assert find(tmp_path, "0::/slurm\n") == ("slurm", None)


def test_version_one_counts_in_files_of_its_own(tmp_path: Path) -> None:
    top = tmp_path / "mount" / "memory"
    make_group(top, VERSION_1, limit="9223372036854771712", charged=9 * GIB)
    make_group(top / "docker/4711", VERSION_1, limit=str(2 * GIB), charged=GIB)
    membership = "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/4711\n0::/\n"
    assert find(tmp_path, membership) == ("memory/docker/4711", 2 * GIB)
    found = find_memory_cgroup(tmp_path / "mount", tmp_path / "membership")
    assert found is not None
    assert (found.charged_bytes(), found.reclaimable_bytes()) == (GIB, GIB // 2)
    assert find(tmp_path, "4:memory:/\n") == ("memory", None)


def test_where_nothing_is_counted_there_is_no_group(tmp_path: Path) -> None:
    assert find(tmp_path, "0::/user.slice\nrubbish\n\n") is None
    assert find_memory_cgroup(tmp_path, tmp_path / "missing") is None
    make_group(tmp_path / "mount", VERSION_2, limit=None, charged=GIB)
    (tmp_path / "mount" / "memory.stat").write_text("\n")
    found = find_memory_cgroup(tmp_path / "mount", tmp_path / "membership")
    assert found is not None
    assert (found.limit_bytes(), found.charged_bytes(), found.reclaimable_bytes()) == (None, GIB, None)


@pytest.mark.parametrize(
    ("membership", "file", "kills"),
    [
        ("0::/job/step\n", "job/step/memory.events", 3),
        ("0::/\n", "memory.events", 3),
        ("0::/not/seen/here\n", "memory.events", 3),
        ("0::/\n4:memory:/job\n", "memory/job/memory.oom_control", 3),
        ("0::/job\n", "other/memory.events", 0),
        ("", "memory.events", 0),
    ],
)
def test_oom_kills_are_those_of_the_group_of_the_job(tmp_path: Path, membership: str, file: str, kills: int) -> None:
    counted = tmp_path / "mount" / file
    counted.parent.mkdir(parents=True)
    counted.write_text("oom 9\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "membership").write_text(membership)
    assert count_oom_kills(tmp_path / "mount", tmp_path / "membership") == kills
