"""Being recorded changes no number of any layout, to the last bit.

All layouts: `python tests/programs/layouts.py FOLDER gpt 3` bare and under `dtprof run --`, then compare the folders.
"""

import json
import sys
from pathlib import Path

import pytest

from dtprof.run_format.reader import open_run
from tests import jobs

pytestmark = pytest.mark.jobs


def curves(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return losses and gradient norms of every step, by layout."""
    found = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name] = [(row["loss"], row["grad_norm"]) for row in rows]
    return found


@pytest.mark.parametrize("model", ["gpt", "bart"])
def test_losses_are_bit_identical_with_and_without_recording(tmp_path: Path, model: str) -> None:
    bare, recorded, run = tmp_path / "bare", tmp_path / "recorded", tmp_path / "run"
    bare.mkdir()
    recorded.mkdir()
    command = [sys.executable, str(jobs.PROGRAMS / "layouts.py")]
    job = jobs.finished(
        [*command, str(bare), model, "2", "covering"], tmp_path, env={"PYTHONPATH": str(jobs.REPOSITORY)}
    )
    assert job.process.returncode == 0, job.stderr
    options = ["--no-native"] if model == "bart" else []
    jobs.recorded(
        run,
        [*command, str(recorded), model, "2", "covering"],
        *options,
        env={"PYTHONPATH": str(jobs.REPOSITORY)},
    )
    assert len(curves(bare)) >= 8
    assert all(len(curve) == 2 for curve in curves(bare).values())
    assert curves(recorded) == curves(bare)
    events = [tables.num_events for tables in open_run(run).load_all()]
    assert min(events) > 1000
