"""Stored runs of format 1 open for ever, and the commands print of them what they always did.

Where an output is meant to change: `python -m tests.golden --update`, then look at what git shows.
"""

import difflib
from pathlib import Path

import pytest

from tests.golden.transcripts import EXPECTED, TRANSCRIPTS, Transcript


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that stored inputs are unpacked to, each when it is first needed."""
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda one: one.name)
def test_commands_print_what_they_did(transcript: Transcript, folder: Path) -> None:
    expected, printed = transcript.expected(), transcript.run(folder)
    if printed != expected:
        changed = difflib.unified_diff(
            expected.splitlines(), printed.splitlines(), f"expected/{transcript.name}", "printed", lineterm="", n=6
        )
        pytest.fail("\n".join([*changed, f"if that is meant: python -m tests.golden --update {transcript.name}"]))


def test_every_expectation_is_of_a_transcript() -> None:
    named = {one.path for one in TRANSCRIPTS}
    assert [path for path in EXPECTED.rglob("*") if path.is_file() and path not in named] == []
