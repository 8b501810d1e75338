"""`dtprof run` around commands that are no training job: everything passes through, and nothing is lost."""

import fcntl
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtprof.cli.main import main
from dtprof.records import schema
from dtprof.records.reader import open_run
from tests import jobs
from tests.builders import RankBuilder, write_run

pytestmark = pytest.mark.jobs

SIGNALS = [sys.executable, str(jobs.PROGRAMS / "signals.py")]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the person who runs the tests out of them."""
    for name in [name for name in os.environ if name.startswith("DTPROF_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_exit_status_is_the_commands_own(tmp_path: Path, status: int) -> None:
    jobs.recorded(tmp_path / "run", ["sh", "-c", f"exit {status}"], status=status)
    assert open_run(tmp_path / "run").manifest.exit_status == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_command_killed_by_a_signal_is_a_death_of_the_same_signal(tmp_path: Path, number: signal.Signals) -> None:
    jobs.recorded(tmp_path / "run", ["sh", "-c", f"kill -{int(number)} $$"], status=-number)
    assert open_run(tmp_path / "run").manifest.exit_status == -number


def test_stdout_and_stderr_pass_byte_for_byte(tmp_path: Path) -> None:
    program = "import os; every = bytes(range(256)) * 300; os.write(1, every); os.write(2, every[::-1])"
    job = jobs.recorded(tmp_path / "run", [sys.executable, "-c", program])
    every = bytes(range(256)) * 300
    assert job.stdout_path.read_bytes() == every
    before, after = job.stderr_path.read_bytes().split(every[::-1])
    assert all(line.startswith(b"dtprof: ") for line in (before + after).splitlines())


def test_stdin_passes(tmp_path: Path) -> None:
    dtprof = shlex.join([*jobs.DTPROF, "run", "-o", str(tmp_path / "run"), "--", "cat"])
    job = jobs.finished(["sh", "-c", f"printf 'a\\0b\\n' | {dtprof}"], tmp_path)
    assert job.process.returncode == 0
    assert job.stdout_path.read_bytes() == b"a\0b\n"


def test_command_inherits_signals_and_descriptors_as_without_dtprof(tmp_path: Path) -> None:
    program = "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; ls /proc/self/fd"
    bare = jobs.finished(["sh", "-c", program], tmp_path).stdout.split()
    under = jobs.recorded(tmp_path / "run", ["sh", "-c", program]).stdout.split()
    for words in (bare, under):
        # Bits 31 and 32 are glibc's own two signals: whether they are ignored depends on who started the tests.
        ignored = words.index("SigIgn:") + 1
        words[ignored] = f"{int(words[ignored], 16) & 0x7FFFFFFF:016x}"
    assert under == bare


def test_no_thread_but_the_one_that_forwards_them_takes_signals(tmp_path: Path) -> None:
    program = """
import glob, os
for file in sorted(glob.glob(f"/proc/{os.getppid()}/task/*/status")):
    status = dict(line.split(":", 1) for line in open(file))
    if int(status["Pid"]) != os.getppid():
        print(int(status["SigBlk"], 16) >> 14 & 1)
"""
    threads = {"OPENBLAS_NUM_THREADS": "2"}
    told = jobs.recorded(tmp_path / "run", [sys.executable, "-c", program], env=threads).stdout.split()
    assert set(told) == {"1"}  # SIGTERM; some there are


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signal_to_dtprof_alone_reaches_the_command_once(tmp_path: Path, number: signal.Signals) -> None:
    seen = tmp_path / "seen"
    command = [*jobs.DTPROF, "run", "-o", str(tmp_path / "run"), "--", *SIGNALS, str(seen)]
    with jobs.started(command, tmp_path) as job:
        job.wait_until(lambda: seen.exists() and "ready" in seen.read_text())
        job.process.send_signal(number)
        job.wait_until(lambda: number.name in seen.read_text())
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 5
    assert seen.read_text().split() == ["ready", number.name, "SIGTERM"]
    assert open_run(tmp_path / "run").manifest.exit_status == 5
    assert "run kept in" in job.stderr


def test_ctrl_c_in_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    ours, theirs = pty.openpty()
    command = [*jobs.DTPROF, "run", "-o", str(tmp_path / "run"), "--", *SIGNALS, str(seen)]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # the terminal's foreground job, as under a shell
    )
    job = jobs.Job(process=process, mark="", stdout_path=tmp_path, stderr_path=tmp_path)  # type: ignore[arg-type]
    try:
        job.wait_until(lambda: seen.exists() and "ready" in seen.read_text())
        os.write(ours, b"\x03")
        job.wait_until(lambda: "SIGINT" in seen.read_text())
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the command too, which would outlive dtprof
        process.wait(30)
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 5
    assert seen.read_text().split() == ["ready", "SIGINT", "SIGTERM"]
    assert b"run kept in" in said


def test_command_that_is_no_python_is_run_and_said_to_be_unrecorded(tmp_path: Path) -> None:
    job = jobs.recorded(tmp_path / "run", ["echo", "hello"])
    assert job.stdout == "hello\n"
    assert "no rank was recorded (no Python process with torch was reached" in job.stderr
    assert "next:" not in job.stderr
    assert open_run(tmp_path / "run").ranks == []


def test_run_deleted_by_the_job_changes_nothing_for_the_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    deleted = f"until rm -r {run} 2>/dev/null; do :; done"  # dtprof may put a file into a folder that is being emptied
    job = jobs.recorded(run, ["sh", "-c", f"{deleted}; echo done; exit 7"], status=7)
    assert job.stdout == "done\n"
    gone = f"dtprof: {run} was moved or deleted: nothing more of the job is kept; the job itself is not touched"
    assert [line for line in job.stderr.splitlines() if str(run) in line] == [gone]
    assert "disk full" not in job.stderr
    assert "Traceback" not in job.stderr


def test_job_without_the_right_to_write_anywhere_is_refused_before_it_starts(tmp_path: Path) -> None:
    mounted = tmp_path / "read-only"
    mounted.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(mounted)]).returncode:
        pytest.skip("mounting a read-only file system needs root")
    try:
        command = [*jobs.DTPROF, "run", "-o", str(mounted / "run"), "--", "touch", str(tmp_path / "started")]
        job = jobs.finished(command, tmp_path)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
    assert job.process.returncode == 2
    assert job.stderr == (
        f"dtprof run: {mounted}/run cannot be written to (Read-only file system); "
        "give a directory that can with -o DIR\n"
    )
    assert not (tmp_path / "started").exists()


def test_off_becomes_the_command(tmp_path: Path) -> None:
    program = "echo $$; env; pwd"
    command = [*jobs.DTPROF, "run", "--off", "-o", str(tmp_path / "run"), "--", "sh", "-c", program]
    with jobs.started(command, tmp_path, cwd=tmp_path) as job:
        assert job.wait() == 0
    pid, *environment, folder = job.stdout.splitlines()
    assert int(pid) == job.process.pid
    assert [line for line in environment if line.startswith("DTPROF_") and jobs.MARK not in line] == []
    assert folder == str(tmp_path)
    assert job.stderr == ""
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "dtprof-runs").exists()


def test_off_can_be_set_in_the_environment(tmp_path: Path) -> None:
    command = [*jobs.DTPROF, "run", "-o", str(tmp_path / "run"), "--", "sh", "-c", "exit 7"]
    job = jobs.finished(command, tmp_path, env={"DTPROF_OFF": "1"})
    assert (job.process.returncode, job.stderr) == (7, "")
    assert not (tmp_path / "run").exists()


def test_settings_of_the_environment_hold_and_options_win(tmp_path: Path) -> None:
    env = {
        "DTPROF_OUTPUT": str(tmp_path / "run"),
        "DTPROF_HANG_AFTER": "30",
        "DTPROF_ON_HANG": "stop",
        "DTPROF_MAX_LOG_MB": "64",
        "DTPROF_NO_NATIVE": "1",
    }
    command = [*jobs.DTPROF, "run", "--max-log-mb", "32", "--", sys.executable, "-c", ""]
    job = jobs.finished(command, tmp_path, env=env)
    assert job.process.returncode == 0
    assert open_run(tmp_path / "run").manifest.settings == {
        "hang_after_s": "30",
        "on_hang": "stop",
        "max_log_mb": "32",
        "max_trace_mb": "64",
    }
    assert "dtprof: using the Python hook, as asked" in job.stderr


def test_default_directory_is_named_and_can_be_given_to_the_next_command(tmp_path: Path) -> None:
    with jobs.started([*jobs.DTPROF, "run", "--", "true"], tmp_path, cwd=tmp_path) as job:
        assert job.wait() == 0
    said = next(line for line in job.stderr.splitlines() if "run kept in" in line)
    assert open_run(tmp_path / said.removeprefix("dtprof: run kept in ")).manifest.command == ("true",)


def test_force_replaces_the_run_before(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(rank, world_size=2) for rank in (0, 1)])
    jobs.recorded(run, ["true"], "--force")
    opened = open_run(run)
    assert (opened.ranks, opened.manifest.command) == ([], ("true",))


def test_empty_address_of_the_metrics_does_not_open_the_port_to_all_networks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["-o", str(tmp_path / "run"), "--metrics-port=0", "--metrics-address="]
    assert main(["run", *options, "--", "true"]) == 0
    assert "metrics of this node are at http://127.0.0.1:" in capfd.readouterr().err


# Refusals: one sentence, the documented status, and nothing left behind.


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Give a function that runs dtprof in an empty folder, expects a refusal, and returns the sentence."""
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: str, status: int) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(arguments) == status
        said = capfd.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before, "a refused command leaves nothing behind"
        return said.err.removesuffix("\n")

    return refuse


@pytest.mark.parametrize("arguments", [["run"], ["run", "--"], ["run", "--hang-after", "5"], ["run", "--off", "--"]])
def test_missing_command_says_where_one_is_expected(refused: Callable[..., str], arguments: list[str]) -> None:
    said = refused(*arguments, status=2)
    assert said.startswith("dtprof run: no command was given; expected one after `--`, for example: dtprof run -- ")


@pytest.mark.parametrize("off", [[], ["--off"]])
def test_unknown_command_ends_with_127(refused: Callable[..., str], off: list[str]) -> None:
    said = refused("run", *off, "--", "no-such-command", "--x", status=127)
    assert said.startswith("dtprof run: 'no-such-command' cannot be started (No such file or directory)")


def test_command_that_is_not_executable_ends_with_127(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert "'./train.py' cannot be started (Permission denied)" in refused("run", "--", "./train.py", status=127)
    assert "cannot be started (Permission denied)" in refused("run", "--", f"{tmp_path}/", status=127)
    said = refused("run", "--", "train.py", status=127)
    assert "'train.py' cannot be started (No such file" in said
    assert said.rstrip().endswith("for example: dtprof run -- python train.py")


@pytest.mark.parametrize(
    ("option", "env", "values"),
    [
        ("--hang-after", "DTPROF_HANG_AFTER", ["-1", "soon", "nan", "inf", "1,5", " "]),
        ("--max-log-mb", "DTPROF_MAX_LOG_MB", ["0", "15.9", "-5", "64M", "inf"]),
        ("--on-hang", "DTPROF_ON_HANG", ["explode", "STOP"]),
        ("--metrics-port", "DTPROF_METRICS_PORT", ["-1", "65536", "9400.0", "http", "\u0663", " "]),
    ],
)
def test_bad_value_names_option_and_value(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, option: str, env: str, values: list[str]
) -> None:
    for value in values:
        said = refused("run", f"{option}={value}", "--", "true", status=2)
        assert said.startswith(f"dtprof run: {option}")
        assert f"{value!r}; expected " in said
        monkeypatch.setenv(env, value)
        said = refused("run", "--", "true", status=2)
        assert f"{value!r}; expected " in said
        assert env in said
        monkeypatch.delenv(env)


def test_output_that_is_taken_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    assert "run is not empty; give another directory, or --force" in refused("run", "-o", "run", "--", "true", status=2)
    (tmp_path / "run" / "results.csv").touch()
    assert "holds 'results.csv', which" in refused("run", "--force", "-o", "run", "--", "true", status=2)
    assert "run.json is a file; expected" in refused("run", "-o", "run/run.json", "--", "true", status=2)
    assert "(Not a directory)" in refused("run", "-o", "run/run.json/new", "--", "true", status=2)


@pytest.mark.parametrize("command", ["summary", "report", "stacks"])
def test_what_is_no_run_is_refused_by_every_command_that_reads_one(
    refused: Callable[..., str], tmp_path: Path, command: str
) -> None:
    assert f"dtprof {command}: gone does not exist; expected the run directory" in refused(command, "gone", status=2)
    (tmp_path / "empty").mkdir()
    assert "empty holds no run: neither run.json nor" in refused(command, "empty", status=2)
    (tmp_path / "file").touch()
    assert "file is a file; expected a run directory" in refused(command, "file", status=2)
    newer = write_run(tmp_path / "newer", [RankBuilder(0, world_size=1)])
    (newer / "run.json").write_text(json.dumps({"format_version": 99}))
    assert f"is of format 99; this dtprof reads formats up to {schema.FORMAT_VERSION}" in refused(
        command, "newer", status=2
    )


def test_diagnose_says_what_it_reads(refused: Callable[..., str], tmp_path: Path) -> None:
    expected = "Expected a run directory, Flight Recorder dumps or job logs."
    assert f"dtprof diagnose: gone does not exist. {expected}" in refused("diagnose", "gone", status=2)
    (tmp_path / "empty").mkdir()
    assert "empty holds no run: neither run.json nor" in refused("diagnose", "empty", status=2)
    (tmp_path / "file").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    assert expected in refused("diagnose", "file", status=2)
    newer = write_run(tmp_path / "newer", [RankBuilder(0, world_size=1)])
    (newer / "run.json").write_text(json.dumps({"format_version": 99}))
    assert f"is of format 99; this dtprof reads formats up to {schema.FORMAT_VERSION}" in refused(
        "diagnose", "newer", status=2
    )


def test_reader_of_our_output_may_go_away(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    job = jobs.finished(["bash", "-c", f"{shlex.join(jobs.DTPROF)} summary {run} --json | head -c 1"], tmp_path)
    assert (job.stdout, job.stderr) == ("{", "")


def test_help_starts_quickly() -> None:
    """The documented bound is 0.3 s on a quiet machine; tests share theirs."""
    usage = [resource_of(subprocess.run, [*jobs.DTPROF, "--help"]) for _ in range(5)]
    assert min(usage) < 0.3


def resource_of(run: Callable[..., object], command: list[str]) -> float:
    """Return the processor seconds that a command took."""
    before = os.times()
    run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
