"""Dumps that this torch writes: byte for byte as the builder writes them, and diagnosed."""

import pickle
from pathlib import Path

import pytest

from benchmarks.torch_pickle import as_torch_pickles
from tests import jobs
from tests.diagnosis.dump_builder import verdict_on

pytestmark = pytest.mark.jobs


def test_dumps_of_a_gloo_job_by_this_torch(tmp_path: Path) -> None:
    program = jobs.PROGRAMS / "flight_recorded.py"
    env = {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    job = jobs.finished(jobs.forked(3, program, str(tmp_path)), tmp_path, env=env)
    assert job.process.returncode == 0, job.stderr

    written = sorted(tmp_path.glob("sound_*"))
    assert verdict_on(written).outcome == "healthy"
    for path in written:
        held = pickle.loads(path.read_bytes())
        assert as_torch_pickles(held) == path.read_bytes()

    verdict = verdict_on(sorted(tmp_path.glob("hung_?")))
    (finding,) = verdict.findings
    assert (finding.culprit_ranks, finding.waiting_ranks, finding.seq) == ((2,), (0, 1), 7)
    lines = program.read_text().splitlines()
    assert "async_op=True" in lines[finding.call_sites[0].line - 1]
    assert "dist.broadcast" in lines[finding.culprit_call_sites[2].line - 1]
    (finding,) = verdict_on(sorted(tmp_path.glob("hung_as_json_*"))).findings
    assert finding.culprit_ranks == (2,)
