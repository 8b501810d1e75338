"""A few trials of the stress script, the same each time: nothing is lost, and each ends as it does without dtprof."""

from pathlib import Path

import pytest

from tests.stress.pairs import run_trials
from tests.stress.program import KINDS

pytestmark = [pytest.mark.jobs, pytest.mark.thorough]
TRIALS, SEED = 10, 20_261_125


@pytest.mark.timeout(900)
def test_no_bad_end_loses_a_record_or_changes_the_end(tmp_path: Path) -> None:
    tallies = run_trials(list(KINDS), TRIALS, SEED, keep=tmp_path / "trials")
    assert {kind: tally.findings for kind, tally in tallies.items()} == {kind: [] for kind in KINDS}
    assert all(tally.clean for tally in tallies.values())
    assert all(tally.trials == TRIALS // len(KINDS) and tally.operations > 0 for tally in tallies.values())
