"""Hung jobs on the simulated accelerator are found while they run, named as on gloo, and stopped.

The host leaves every collective at once there, and hangs elsewhere or not at all: what is known, devices tell.
"""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests import jobs
from tests.accelerator.compiled_device import ensure_library

pytestmark = pytest.mark.jobs

HANG_AFTER_S = 4
LATEST_S = HANG_AFTER_S + 2
PROGRAM = jobs.PROGRAMS / "device_faults.py"
LINES = PROGRAM.read_text().splitlines()
BROADCAST = next(i for i, line in enumerate(LINES, 1) if "dist.broadcast" in line)
WAIT = next(i for i, line in enumerate(LINES, 1) if ".item()" in line and "torch.ones" in line)
OTHER_CALL = next(i for i, line in enumerate(LINES, 1) if "dist.all_reduce(torch" in line)


class Expected(NamedTuple):
    """What must be said of a fault."""

    kind: str
    culprits: list[int]
    line: int | None = None  # of the first rank that waits


HANGS = {
    "stays_away": Expected("rank-stuck", [1], BROADCAST),
    "skips": Expected("rank-skipped-collective", [1], BROADCAST),
    "calls_another": Expected("collective-order-mismatch", [1], BROADCAST),
    "runs_a_kernel_that_never_ends": Expected("rank-stuck", [1], BROADCAST),
    "waits_for_its_device": Expected("rank-stuck", [1], BROADCAST),
    "loses_the_network": Expected("backend-stall", [], BROADCAST),
}


class Outcome(NamedTuple):
    """What became of a job."""

    status: int
    output: str
    verdict: dict[str, Any]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run all programs side by side: they mostly wait."""
    ensure_library()
    folder = tmp_path_factory.mktemp("faults")

    def run(name: str) -> Outcome:
        run = folder / name
        options = ["-o", str(run), "--hang-after", str(HANG_AFTER_S), "--on-hang", "stop"]
        command = [*jobs.DTPROF, "run", *options, "--", *jobs.forked(2, PROGRAM, name)]
        job = jobs.finished(command, folder, env={"PYTHONPATH": str(jobs.REPOSITORY)})
        said = subprocess.run([*jobs.DTPROF, "diagnose", "--json", str(run)], capture_output=True, text=True)
        facts = json.loads((run / "run.json").read_text())
        return Outcome(job.process.returncode, job.stderr, json.loads(said.stdout), facts)

    names = [*HANGS, "dies", "is_late"]
    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


@pytest.mark.parametrize("name", HANGS)
def test_hang_is_found_in_time_and_named_and_the_job_stopped(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, expected = outcomes[name], HANGS[name]
    assert outcome.facts["stopped_on_hang"], outcome.output
    quiet = [int(s) for s in re.findall(r"no rank has made progress for (\d+) s", outcome.output)]
    assert quiet
    assert quiet[0] <= LATEST_S
    finding = outcome.verdict["findings"][0]
    assert (outcome.verdict["outcome"], finding["kind"], finding["culprit_ranks"]) == ("hang", *expected[:2])
    if expected.line is not None:
        assert f"{PROGRAM}:{expected.line}" in outcome.output


def test_the_call_in_which_a_host_waits_for_its_device_is_named(outcomes: dict[str, Outcome]) -> None:
    summary = outcomes["waits_for_its_device"].verdict["findings"][0]["summary"]
    assert "blocked in simStreamSynchronize: it waits for its own device" in summary
    assert f"{PROGRAM}:{WAIT}" in summary


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs_a_kernel_that_never_ends", "it was begun by the devices of rank 0, not by those of rank 1"),
        ("loses_the_network", "it was begun by the devices of ranks 0, 1, and completed on none"),
    ],
)
def test_where_devices_began_an_operation_and_where_not_is_evidence(
    name: str, words: str, outcomes: dict[str, Outcome]
) -> None:
    verdict = outcomes[name].verdict
    assert words in verdict["findings"][0]["evidence"]
    assert any("the health of these devices is not known" in reason for reason in verdict["cannot_tell"])


def test_rank_that_dies_is_named_and_not_those_that_lose_it(outcomes: dict[str, Outcome]) -> None:
    finding = outcomes["dies"].verdict["findings"][0]
    assert (finding["kind"], finding["culprit_ranks"]) == ("rank-killed", [1])


def test_job_whose_rank_is_late_for_less_than_the_threshold_is_sound(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["is_late"]
    assert (outcome.status, outcome.verdict["outcome"], outcome.verdict["findings"]) == (0, "healthy", [])
    assert "no rank has made progress" not in outcome.output
