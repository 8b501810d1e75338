"""Stacks taken from outside: what is told where py-spy gets none, and that it is asked again where it may yet."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from dtprof.launch import stack_sampler

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
    monkeypatch.setattr(stack_sampler, "CPU_WINDOW_S", 0.001)
    own = psutil.Process().pid
    facts = stack_sampler.sample([own], tmp_path)["processes"][str(own)]
    assert ("threads" in facts) == is_told
    assert is_told or facts["reason"].endswith("Operation not permitted")
    assert json.loads((tmp_path / "count").read_text(encoding="utf-8")) == min(refusals + 1, 3)
