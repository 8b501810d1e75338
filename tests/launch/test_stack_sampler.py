"""Stacks taken from outside: what is told where py-spy gets none, and that it is asked again where it may yet."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtprof.launch import stack_sampler
from dtprof.launch.work_counters import WorkCounters, read_work_counters
from dtprof.records import paths

HELD = """Error: Failed to get stack traces

Caused by:
    0: Failed to suspend process
    1: EPERM: Operation not permitted

Stack backtrace:
   0: py_spy::main
   9: main
"""


@pytest.mark.parametrize(
    ("complaint", "reason"),
    [
        (HELD, "Failed to get stack traces: EPERM: Operation not permitted"),
        ("Error: Failed to find python version\n\nStack backtrace:\n   9: main\n", "Failed to find python version"),
        ("Permission Denied: Try running again with elevated permissions\n", "Permission Denied: Try running again"),
        ("", "no answer"),
    ],
)
def test_the_reason_is_the_complaint_and_no_line_of_a_backtrace(complaint: str, reason: str) -> None:
    assert stack_sampler.reason_in(complaint).startswith(reason)


def spy(folder: Path, refusals: int) -> Path:
    """Return a program that refuses so often, and then answers as py-spy does."""
    file = folder / "py-spy"
    count = folder / "count"
    count.write_text("0", encoding="utf-8")
    file.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        f"count = pathlib.Path({str(count)!r})\n"
        "asked = int(count.read_text())\n"
        "count.write_text(str(asked + 1))\n"
        f"if asked < {refusals}:\n"
        f"    sys.exit({HELD!r})\n"
        "print('[]')\n",
        encoding="utf-8",
    )
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(("refusals", "is_told"), [(0, True), (2, True), (3, False)])
def test_a_process_that_another_holds_is_asked_for_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int, is_told: bool
) -> None:
    file = spy(tmp_path, refusals)
    monkeypatch.setattr(stack_sampler, "find_py_spy", lambda: str(file))
    monkeypatch.setattr(stack_sampler, "PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(stack_sampler, "WINDOW_S", 0.001)
    # This process runs: of one that is busy a second stack is taken.
    monkeypatch.setattr(stack_sampler, "_is_busy", lambda _: False)
    own = psutil.Process().pid
    facts = stack_sampler.sample([own], tmp_path)["processes"][str(own)]
    assert ("threads" in facts) == is_told
    assert is_told or facts["reason"].endswith("Operation not permitted")
    assert json.loads((tmp_path / "count").read_text(encoding="utf-8")) == min(refusals + 1, 3)


LOST = "Error: Failed to find a python interpreter in the .data section"
THREAD = {"thread_name": "MainThread", "owns_gil": False, "frames": [{"name": "work", "filename": "a.py", "line": 3}]}


@pytest.mark.parametrize(("failures", "state"), [((), "native"), ((1,), "native"), ((1, 2), "unseen"), ((0, 1), None)])
def test_of_a_busy_process_whose_second_stack_is_not_to_be_had_no_change_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: tuple[int, ...], state: str | None
) -> None:
    asked: list[int] = []

    def dump(_: list[str]) -> tuple[Any, str]:
        asked.append(len(asked))
        return (None, LOST) if asked[-1] in failures else ([dict(THREAD)], "")

    monkeypatch.setattr(stack_sampler, "_dump_once", dump)
    monkeypatch.setattr(stack_sampler, "PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(stack_sampler, "WINDOW_S", 0.001)
    monkeypatch.setattr(stack_sampler, "_is_busy", lambda _: True)
    own = psutil.Process().pid
    facts = stack_sampler.sample([own], tmp_path)["processes"][str(own)]
    assert facts.get("python_state") == state
    assert ("threads" in facts) == (state is not None)


def sampled(folder: Path, *program: str) -> dict[str, Any]:
    """Return the sample of a program that has printed a line; skip where it may not be traced."""
    with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            facts: dict[str, Any] = stack_sampler.sample([process.pid], folder)["processes"][str(process.pid)]
        finally:
            process.kill()
    if "threads" not in facts:
        pytest.skip(facts["reason"])
    return facts


LOOPS = {
    "changed": "total = 0\n    while True:\n        total += 1",
    "unchanged": "ready = False\n    while not ready:\n        pass",
}


@pytest.mark.parametrize("state", LOOPS)
def test_a_loop_that_changes_no_variable_is_told_from_one_that_works(tmp_path: Path, state: str) -> None:
    program = f"def main():\n    {LOOPS[state]}\n\nprint('started', flush=True)\nmain()\n"
    facts = sampled(tmp_path, "-c", program)
    assert facts["python_state"] == state
    assert all("locals" not in frame for thread in facts["threads"] for frame in thread["frames"])


def test_a_loop_at_the_top_level_of_a_program_is_endless_where_its_source_has_no_exit(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("print('started', flush=True)\nn = 0\nwhile True:\n    n += 1\n", encoding="utf-8")
    assert sampled(tmp_path, str(program))["python_state"] == "endless"


def test_bytes_read_and_written_are_counted(tmp_path: Path) -> None:
    before = read_work_counters(os.getpid()).io_bytes
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    after = read_work_counters(os.getpid()).io_bytes
    assert before is not None
    assert after is not None
    assert after - before >= 100_000


@pytest.mark.parametrize("is_current", [True, False])
def test_stacks_of_processes_that_have_gone_on_are_not_written(tmp_path: Path, is_current: bool) -> None:
    stack_sampler.sample([os.getpid()], tmp_path, is_current=lambda: is_current)
    assert (tmp_path / paths.STACKS).exists() == is_current


def test_of_a_process_that_has_ended_nothing_is_known() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    assert read_work_counters(process.pid) == WorkCounters()
