"""Loops that cannot end by themselves, read from source."""

import os
from pathlib import Path

import pytest

from dtprof.lint.endless_loops import find_endless_loop, find_names_bound_in_loop

LATER = float("inf")
ENDLESS = {
    "nothing": "while True:\n    pass  # here",
    "counts": "n = 0\nwhile 1:\n    n += 1  # here",
    "waits for a flag that another thread sets": "while not done:\n    pass  # here",
    "compares": "while n < 3 and not (a or b):\n    m = n  # here",
    "binds its name in an else, after its end": "while not done:\n    n = 1  # here\nelse:\n    done = True",
    "an inner loop that ends": "while True:\n    for i in items:\n        total = i  # here",
}
ENDS = {
    "breaks": "while True:\n    if n > 3:\n        break\n    n += 1  # here",
    "returns": "def f(n):\n    while True:\n        if n:\n            return\n        n += 1  # here",
    "calls": "while True:\n    work()  # here",
    "asks by a call": "while not os.path.exists(marker):\n    pass  # here",
    "asks an attribute": "while not self.done:\n    pass  # here",
    "meets its condition": "while n < 10:\n    n += 1  # here",
    "binds the name in a target": "while x:\n    for x in items:\n        y = x  # here",
    "never runs": "while False:\n    pass  # here",
    "no loop": "n = 1  # here",
    "in a function that the loop only defines": "while True:\n    def f():\n        n = 1  # here\n    g = f",
}


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here"))


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_loop_without_an_exit_is_found(tmp_path: Path, text: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(text, encoding="utf-8")
    assert find_endless_loop(str(file), line_of(text), started_s=LATER) is not None


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS)
def test_a_loop_that_may_end_is_not(tmp_path: Path, text: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(text, encoding="utf-8")
    assert find_endless_loop(str(file), line_of(text), started_s=LATER) is None


@pytest.mark.parametrize("content", [None, b"while True:\n  pass\n )", b"\xff\xfe\x00"])
def test_without_a_readable_source_nothing_is_claimed(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "train.py"
    if content is not None:
        file.write_bytes(content)
    assert find_endless_loop(str(file), 2, started_s=LATER) is None


def test_a_source_that_changed_after_the_program_started_says_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("while True:\n    pass\n", encoding="utf-8")
    os.utime(file, (1000, 1000))
    assert find_endless_loop(str(file), 2, started_s=1001) == 1
    assert find_endless_loop(str(file), 2, started_s=999) is None


def test_the_names_that_the_innermost_loop_binds_are_known(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("while a:\n    b = 1\n    for c in d:\n        e = f(c)\n", encoding="utf-8")
    assert find_names_bound_in_loop(str(file), 4, started_s=LATER) == {"c", "e"}
    assert find_names_bound_in_loop(str(file), 2, started_s=LATER) == {"b", "c", "e"}
    assert find_names_bound_in_loop(str(file), 9, started_s=LATER) is None
