"""Every torch job of a machine is recorded into a store, nothing else is touched, and it can be turned off."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtprof import settings
from dtprof.cli.main import main
from dtprof.errors import OutputError
from dtprof.launch import always_on, injection
from dtprof.records import run_facts
from dtprof.records.reader import open_run
from tests.jobs import REPOSITORY, TIMEOUT_S

ME = run_facts.user_name(os.getuid())
SAYS_WHAT_IT_IS = "import os, sys; print(sys.argv[1:], os.environ.get('DTPROF_RUN_DIR'), 'dtprof_start' in sys.modules)"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Return a Python of an environment that sees the packages of this one, where every job is recorded."""
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=TIMEOUT_S)
    python = place / "bin" / "python"
    packages = next((place / "lib").glob("python3*/site-packages"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "of_the_tests.pth").write_text(f"{here}\n{REPOSITORY}\n")
    return python


@pytest.fixture
def store(tmp_path: Path, venv: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the store that is installed there; jobs that run on this machine are none of its business."""
    monkeypatch.setattr(settings, "JOBS_FOLDER", f"{tmp_path}/jobs-%d")
    folder = tmp_path / "store"
    assert main(["inject", "install", "--site", "--store", str(folder), "--python", str(venv), "--keep", "2d"]) == 0
    assert f"every torch job is recorded into {folder}" in capsys.readouterr().out
    return folder


def ran(python: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python without any variable of dtprof but those given."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("DTPROF_", "RANK"))}
    return subprocess.run(
        [str(python), *arguments],
        env={**bare, **env},
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_what_is_no_torch_job_is_left_alone(venv: Path, store: Path, tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(SAYS_WHAT_IT_IS)
    for arguments in (("-c", SAYS_WHAT_IT_IS, "torchrun"), (str(script), "torchrun"), ("-X", "utf8", str(script))):
        result = ran(venv, *arguments)
        assert result.stdout.split("]")[1].split() == ["None", "False"]
        assert result.stderr == ""
    # A rank of a job without torch waits for torch in vain.
    result = ran(venv, "-c", SAYS_WHAT_IT_IS, RANK="0", WORLD_SIZE="2")
    assert result.stdout == "[] None True\n"
    assert [path.name for path in store.iterdir()] == [always_on.POLICY]


def launcher(folder: Path) -> Path:
    """Return a program with the name of a launcher that says how it was started."""
    script = folder / "torchrun"
    script.write_text(SAYS_WHAT_IT_IS)
    return script


def test_a_launcher_becomes_the_command_of_a_recorded_run(venv: Path, store: Path, tmp_path: Path) -> None:
    result = ran(venv, "-X", "utf8", str(launcher(tmp_path)), "--nnodes", "2")
    assert result.returncode == 0, result.stderr
    (run,) = (store / ME).iterdir()
    assert result.stdout.startswith(f"['--nnodes', '2'] {run} ")
    assert open_run(run).manifest.exit_status == 0
    assert (store / ME).stat().st_mode & 0o777 == 0o700
    result = ran(venv, str(launcher(tmp_path)), DTPROF_ALWAYS=str(tmp_path / "another"))
    assert " None " in result.stdout
    assert f"this job is not recorded: there is no folder {tmp_path}/another; make it with" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.thorough
def test_a_variable_of_the_image_does_it_as_well(venv: Path, tmp_path: Path) -> None:
    injection.install(str(venv))
    assert ran(venv, str(launcher(tmp_path))).stdout.startswith("[] None ")
    (tmp_path / "here").mkdir()
    result = ran(venv, str(launcher(tmp_path)), DTPROF_ALWAYS=str(tmp_path / "here"))
    assert f"[] {tmp_path}/here/{ME}/" in result.stdout


@pytest.mark.thorough
def test_always_on_recording_is_turned_off_for_a_job_and_for_the_machine(
    venv: Path, store: Path, tmp_path: Path
) -> None:
    program = launcher(tmp_path)
    assert ran(venv, str(program), DTPROF_OFF="1").stdout.startswith("[] None ")
    (store / always_on.OFF).touch()
    assert ran(venv, str(program)).stdout.startswith("[] None ")
    (store / always_on.OFF).unlink()
    assert ran(venv, str(program)).stdout.startswith(f"[] {store}/{ME}/")


def test_a_job_runs_whatever_the_store_is_like(venv: Path, store: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (store / ME).symlink_to(tmp_path / "elsewhere")
    result = ran(venv, str(launcher(tmp_path)), "x")
    assert result.returncode == 0
    assert result.stdout.startswith("['x'] None ")
    assert result.stderr.count("\n") == 1
    assert "is a link, another user's, or others may write to it" in result.stderr
    assert "the job is not recorded" in result.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    result = ran(venv, str(launcher(tmp_path)), DTPROF_ALWAYS="store")
    assert result.stdout.startswith("[] None ")
    assert "DTPROF_ALWAYS is 'store', a relative path" in result.stderr
    result = ran(venv, str(launcher(tmp_path)), DTPROF_HANG_AFTER="soon")
    assert result.returncode == 0
    assert "DTPROF_HANG_AFTER" in result.stderr


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a file system in memory at a new folder."""
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(folder)]).returncode:
        pytest.skip("a full or read-only store is not tested: mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_job_runs_where_the_store_is_read_only(venv: Path, tmp_path: Path) -> None:
    injection.install(str(venv))
    with mounted(tmp_path / "store", "-o", "ro") as store:
        result = ran(venv, str(launcher(tmp_path)), "x", DTPROF_ALWAYS=str(store))
    assert result.returncode == 0
    assert result.stdout.startswith("['x'] None ")
    assert result.stderr == (
        f"dtprof: {store}/{ME} cannot be made (Read-only file system); expected the store of `inject install`: "
        "the job is not recorded\n"
    )


def test_a_job_runs_where_the_store_is_full(venv: Path, tmp_path: Path) -> None:
    injection.install(str(venv))
    with mounted(tmp_path / "store", "-o", "size=64k") as store:
        with pytest.raises(OSError, match="No space left"):
            (store / "others").write_bytes(bytes(1 << 20))
        # Where each launch starts the next one, the job never begins: `timeout` ends all of them, as one process group.
        command = ["timeout", "--signal=KILL", "30", str(venv), str(launcher(tmp_path)), "x"]
        result = ran(Path("/usr/bin/env"), *command, DTPROF_ALWAYS=str(store))
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("['x'] None ")
    assert result.stderr.count("\n") == 1
    assert "cannot be written to (No space left on device)" in result.stderr
    assert "nothing is recorded, the job runs uninstrumented" in result.stderr


def test_nobody_else_can_prepare_a_folder_a_policy_or_a_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    always_on.make_store(store, {**always_on.DEFAULT_POLICY, "keep_days": 3})
    assert store.stat().st_mode & 0o7777 == (0o1777 if os.getuid() == 0 else 0o755)
    assert always_on.read_policy(store)["keep_days"] == 3
    folder = always_on.user_folder(store)
    folder.chmod(0o777)
    with pytest.raises(OutputError, match="others may write to it"):
        always_on.user_folder(store)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 4711)  # another user, whom neither folder nor policy belongs to
    (store / "4711").mkdir(mode=0o700)
    if store.stat().st_uid != 0:
        assert always_on.read_policy(store) == always_on.DEFAULT_POLICY
    with pytest.raises(OutputError, match="another user's"):
        always_on.user_folder(store)
    with pytest.raises(OutputError, match="another user's"):
        always_on.make_store(store, always_on.DEFAULT_POLICY)


@pytest.mark.parametrize("text", ["", "[]", '{"keep_days": "long", "max_gb_per_user": -1}', "{" * 9000])
def test_a_damaged_policy_is_the_default(text: str, tmp_path: Path) -> None:
    (tmp_path / always_on.POLICY).write_text(text)
    assert always_on.read_policy(tmp_path) == always_on.DEFAULT_POLICY


@pytest.mark.thorough
def test_runs_that_the_policy_does_not_keep_go_when_the_next_job_starts(
    venv: Path, store: Path, tmp_path: Path
) -> None:
    for name, days in (("old", 3.0), ("new", 1.0)):
        run = store / ME / name
        (run / "node-a").mkdir(parents=True)
        started_ns = int((time.time() - days * 86_400) * 1e9)
        (run / "run.json").write_text(
            json.dumps(
                {
                    "format_version": 1,
                    "command": ["torchrun", "x.py"],
                    "hosts": ["a"],
                    "started_realtime_ns": started_ns,
                    "ended_realtime_ns": started_ns + 10**9,
                    "exit_status": 0,
                }
            )
        )
    (store / ME).chmod(0o700)
    program = tmp_path / "torchrun"
    waits = f"import os, time\nwhile os.path.exists({str(store / ME / 'old')!r}): time.sleep(0.05)"
    program.write_text(waits)
    assert ran(venv, str(program)).returncode == 0
    assert (store / ME / "new").exists()


def test_options_of_the_site_need_it() -> None:
    assert main(["inject", "install", "--max-gb", "5"]) == 2
    assert main(["inject", "install", "--site", "--keep", "long"]) == 2


@pytest.mark.jobs
@pytest.mark.thorough
def test_torchrun_and_a_rank_without_a_launcher_are_recorded(venv: Path, store: Path, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nfor _ in range(5): dist.all_reduce(torch.ones(3))\n"
        "dist.destroy_process_group()\n"
    )
    result = ran(venv, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program))
    assert result.returncode == 0, result.stderr
    (first,) = (store / ME).iterdir()
    assert [len(open_run(first).load(rank).operations) for rank in (0, 1)] == [5, 5]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    result = ran(venv, str(program), **alone)
    assert result.returncode == 0, result.stderr
    (second,) = set((store / ME).iterdir()) - {first}
    assert len(open_run(second).load(0).operations) == 5
