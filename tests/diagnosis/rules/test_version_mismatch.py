"""Ranks that run other versions of torch or Python than most."""

from collections.abc import Mapping
from dataclasses import replace

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from tests.diagnosis.judging import build_job, found_by, gradients, ranks_in_step

USUAL = {"torch": "2.13.0+cpu", "Python": "3.11.7"}


def job_of(*versions: Mapping[str, str], stalled: bool = False) -> JobState:
    """Return a job of a rank on a host of its own for each of these versions; stalled, rank 0 waits for all others."""
    ranks = ranks_in_step(len(versions), 3)
    for rank, name in zip(ranks, "abcd", strict=False):
        rank.host = name
    if stalled:
        gradients(ranks[0], 3000, done=False)
    job = build_job(ranks, exit_status=None if stalled else 0, stalled=stalled)
    states = {number: replace(rank, versions=versions[number]) for number, rank in job.ranks.items()}
    return replace(job, ranks=states)


FAULTY = {"version-mismatch": lambda: job_of(USUAL, USUAL | {"torch": "2.12.0+cpu"}, USUAL)}


def SOUND() -> JobState:  # noqa: N802 - the name that every file of rules has
    """Return a job of which one rank does not tell."""
    return job_of(USUAL, {}, USUAL)


def test_the_host_with_another_torch_is_named_and_the_job_is_at_risk() -> None:
    verdict = decide(job_of(USUAL, USUAL | {"torch": "2.12.0+cpu"}, USUAL))
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.severity) == ("risk", "warning")
    assert (finding.culprit_ranks, finding.culprit_hosts) == ((1,), ("b",))
    assert finding.summary == "Ranks run different versions of torch: b, rank 1 2.12.0+cpu; ranks 0, 2 2.13.0+cpu."


def test_of_equal_parts_the_first_rank_has_the_usual_version() -> None:
    assert decide(job_of(USUAL, USUAL | {"Python": "3.12.1"})).findings[0].culprit_hosts == ("b",)


def test_builds_of_one_release_and_patches_of_python_are_notes() -> None:
    verdict = decide(job_of(USUAL, {"torch": "2.13.0+cu130", "Python": "3.11.9"}))
    assert verdict.outcome == "healthy"
    assert [finding.severity for finding in verdict.findings] == ["info", "info"]


def test_a_version_mismatch_stands_behind_the_cause_of_a_hang() -> None:
    verdict = decide(job_of(USUAL, USUAL | {"torch": "2.12.0"}, stalled=True))
    assert [finding.kind for finding in verdict.findings][-1] == "version-mismatch"
    assert len(verdict.findings) == 2
    assert verdict.outcome == "hang"
    assert len(found_by("version_mismatch", job_of(USUAL, USUAL | {"torch": "2.12.0"}, stalled=True))) == 1
