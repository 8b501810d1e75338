"""A file of ours is never taken for one of the program's."""

import os
from pathlib import Path

from dtprof.capture.reopened_files import ReopenedFile


def test_a_descriptor_that_the_program_gave_to_its_own_file_is_left_to_it(tmp_path: Path) -> None:
    ours = ReopenedFile(tmp_path / "ours", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    first = ours.descriptor()
    os.write(first, b"one ")
    os.close(first)
    taken = os.open(tmp_path / "theirs", os.O_WRONLY | os.O_CREAT)
    assert taken == first
    assert ours.descriptor() != first
    os.write(ours.descriptor(), b"two")
    assert (tmp_path / "ours").read_bytes() == b"one two"
    assert (tmp_path / "theirs").read_bytes() == b""
    os.close(taken)
    os.close(ours.descriptor())


def test_one_that_was_only_closed_is_opened_again(tmp_path: Path) -> None:
    ours = ReopenedFile(tmp_path / "ours", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.close(ours.descriptor())
    os.write(ours.descriptor(), b"again")
    assert (tmp_path / "ours").read_bytes() == b"again"
    os.close(ours.descriptor())
