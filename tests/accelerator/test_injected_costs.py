"""Injected costs, exposed times, waits and bubbles come out of the summary within 2 %, under every layout."""

from pathlib import Path

import pytest

from tests.accelerator.known_truth import JOBS, compare

pytestmark = [pytest.mark.jobs, pytest.mark.alone]
IN_THE_GATE = {"fsdp1,late", "fsdp2,late"}
"""Streams of their own for gathers and reductions, waits for streams and events, a rank that is late."""


@pytest.mark.parametrize(
    "job", [job if job in IN_THE_GATE else pytest.param(job, marks=pytest.mark.thorough) for job in JOBS]
)
def test_summary_says_what_the_devices_did(tmp_path: Path, job: str) -> None:
    figures = compare(tmp_path, job)
    assert len(figures) >= 18
    assert [figure for figure in figures if not figure.holds] == []
