"""The fence: our errors are told and kept in, those of the job's signal handlers pass, a broken stderr does no harm."""

import functools
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprof import fence
from tests import jobs
from tests.matrix.pythons import find_python


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with nothing said, and nobody to tell."""
    for name, empty in (("_warned", {}), ("_shared", []), ("_notes", []), ("_homes", [])):
        monkeypatch.setattr(fence, name, empty)


@fence.fenced("a thing")
def fail() -> None:
    raise ValueError("broken")


LINE = "a thing is not recorded in this process: ValueError: broken"


def test_our_error_is_reported_once_and_kept_in(capsys: pytest.CaptureFixture[str]) -> None:
    fail()
    fail()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"dtprof: {LINE}\n")


def test_errors_that_name_something_else_each_time_are_reported_a_few_times(capsys: pytest.CaptureFixture[str]) -> None:
    @fence.fenced("a thing")
    def fail_at(address: int) -> None:
        raise KeyError(address)

    for address in range(1_000):
        fail_at(address)
    fail()  # another kind
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "dtprof: a thing is not recorded in this process: KeyError: 0"
    assert len(told) == fence.MOST_ALIKE + 1
    assert len(fence._warned) == fence.MOST_ALIKE + 1


def test_errors_about_a_run_that_is_gone_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @fence.fenced("a look")
    def look() -> None:
        (tmp_path / "run" / "run.json").read_text()

    fence.set_run(tmp_path / "run")
    look()
    fence.fenced("another")(look.__wrapped__)()  # type: ignore[attr-defined]
    fail()  # which has another cause
    gone = f"{tmp_path / 'run'} was moved or deleted: nothing more of the job is kept; the job itself is not touched"
    assert capsys.readouterr().err.splitlines() == [f"dtprof: {gone}", f"dtprof: {LINE}"]


def test_what_was_reported_before_there_was_a_log_is_noted_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    fail()
    noted: list[str] = []
    fence.on_note(noted.append)
    fence.warn_once("more")
    assert noted == [LINE, "more"]
    assert capsys.readouterr().err == f"dtprof: {LINE}\ndtprof: more\n"


def test_processes_that_share_a_folder_print_once_and_each_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    fence.share_warnings(tmp_path)
    fence.on_note(noted.append)
    fail()
    monkeypatch.setattr(fence, "_warned", {})  # as in another process
    fail()
    assert noted == [LINE, LINE]
    assert capsys.readouterr().err == f"dtprof: {LINE}\n"


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError(f"no place for {len(text)} characters")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, Broken(), closed(), object()], ids=["none", "broken", "closed", "no file"])
def test_stderr_that_cannot_be_written_to_does_no_harm(
    stderr: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    fence.on_note(noted.append)
    monkeypatch.setattr(sys, "stderr", stderr)
    fail()
    assert capsys.readouterr().out == ""
    assert LINE in noted


def test_line_on_a_closed_descriptor_leaves_the_exit_status_alone() -> None:
    program = "import os; from dtprof import fence; os.close(2); fence.warn_once('text'); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7


def test_note_that_cannot_be_written_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(text: str) -> None:
        raise OSError(text)

    fence.on_note(refuse)
    fail()
    assert capsys.readouterr().err == f"dtprof: {LINE}\n"


class Timeout(Exception):
    """What the job's own handler raises."""


def by_function(*_: object) -> None:
    raise Timeout


class Handlers:
    """Other things that may handle a signal."""

    def method(self, *_: object) -> None:
        raise Timeout

    def __call__(self, *_: object) -> None:
        raise Timeout


@pytest.fixture
def no_handler_left() -> Iterator[None]:
    """Put back what handled the signal."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("no_handler_left")
@pytest.mark.parametrize(
    "handler",
    [by_function, Handlers().method, Handlers(), functools.partial(by_function, 1), lambda *_: by_function()],
    ids=["function", "method", "callable", "partial", "lambda"],
)
def test_exception_of_the_jobs_signal_handler_passes(handler: object, capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]

    @fence.fenced("a thing")
    def record() -> None:
        signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Timeout):
        record()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("no_handler_left")
def test_our_error_below_the_jobs_signal_handler_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: fail())
    signal.raise_signal(signal.SIGUSR1)
    assert capsys.readouterr().err == f"dtprof: {LINE}\n"


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_a_function_that_stands_in_for_another_is_in_no_traceback(version: str) -> None:
    if (python := find_python(version)) is None:
        pytest.skip(f"there is no Python {version}")
    program = [python, str(jobs.PROGRAMS / "hidden_frames.py")]
    environment = os.environ | {"PYTHONPATH": str(jobs.REPOSITORY)}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "alike\n"
