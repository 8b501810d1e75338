"""A source file that was changed after the job had started tells nothing of what ran, and the verdict says so."""

import os
from pathlib import Path

import pytest

from dtprof.diagnosis.sources.program_source import finder_of_changes, finder_of_places
from dtprof.diagnosis.verdict import decide
from tests.diagnosis.judging import build_job, gradients, with_loaders

STARTED_NS = 1_000_000_000


@pytest.mark.parametrize(("written_ns", "changed"), [(STARTED_NS - 1, False), (STARTED_NS, True)])
def test_only_a_file_that_is_as_it_was_at_the_start_is_read(tmp_path: Path, written_ns: int, changed: bool) -> None:
    source = tmp_path / "train.py"
    source.write_text("for step in range(3):\n    print(step)\n")
    os.utime(source, ns=(written_ns, written_ns))
    assert finder_of_changes(STARTED_NS)(str(source)) is changed
    assert (finder_of_places(STARTED_NS)(str(source), 2) is None) is changed
    assert not finder_of_changes(STARTED_NS)(str(tmp_path / "gone.py"))


@pytest.mark.parametrize("changed", [True, False])
def test_the_verdict_names_a_changed_file_of_its_findings(changed: bool) -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, True, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    verdict = decide(build_job(ranks, exit_status=None, was_changed=lambda _: changed))
    reasons = [reason for reason in verdict.cannot_tell if "was changed after the job had started" in reason]
    assert len(reasons) == changed
    assert all(reason.startswith("/home/me/train.py") for reason in reasons)
