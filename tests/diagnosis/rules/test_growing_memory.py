"""Memory that grows from step to step."""

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from tests.builders import RankBuilder
from tests.diagnosis.judging import STEP, build_job, gradients

MIB = 1 << 20


def job_of(
    growing: int, *, steps: int = 60, settles_at: int = 1000, device: bool = False, hangs: bool = False
) -> JobState:
    """Return a job of two ranks; one grows by 20 MiB a step, up to a step where it settles."""
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        for step in range(steps):
            rank.span("backward", step * STEP, step * STEP + 200)
            gradients(rank, step * STEP, done=True)
            rank.span("optimizer", step * STEP + 300, step * STEP + 310)
            grown = min(step, settles_at) * 20 * MIB if rank.rank == growing else 0
            rank.sample("cuda_allocated_bytes" if device else "heap_bytes", step * STEP + 320, 500 * MIB + grown)
            rank.sample("rss_bytes", step * STEP + 330, 900 * MIB + (0 if device else grown))
    if hangs:
        gradients(ranks[0], steps * STEP, done=False)
    return build_job(ranks, exit_status=None if hangs else 0, stalled=hangs)


FAULTY = {"memory-growth": lambda: job_of(1)}


def SOUND() -> JobState:  # noqa: N802 - the name that every file of rules has
    """Return a job whose allocator settles in during the first half."""
    return job_of(1, settles_at=25)


def test_a_leak_is_a_note_with_its_rate_and_the_job_is_healthy() -> None:
    verdict = decide(job_of(1))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.severity, finding.culprit_ranks) == ("healthy", "info", (1,))
    assert finding.summary == "Memory of rank 1 goes on growing, by 20.0 MiB a step."


def test_a_leak_on_a_device_is_told_apart() -> None:
    assert decide(job_of(0, device=True)).findings[0].summary.startswith("Device memory of rank 0 goes on growing")


def test_few_steps_tell_nothing() -> None:
    assert decide(job_of(1, steps=20)).findings == ()


def test_memory_growth_stands_behind_the_cause_of_a_hang() -> None:
    verdict = decide(job_of(0, hangs=True))
    assert verdict.outcome == "hang"
    assert [finding.kind for finding in verdict.findings][1:] == ["memory-growth"]
