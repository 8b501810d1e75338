"""The one model of stalls: how long a job may make no progress, and why."""

import pytest

from dtprof.job.stalls import (
    INTERVAL_NS,
    MIN_PAUSES,
    Pauses,
    Progress,
    RankPhase,
    RankProgress,
    assess_job,
    had_stalled,
    phase_of,
    stall_threshold,
)

S = 1_000_000_000


def state_of(*ranks: RankProgress, hang_after_s: float = 60, usual_pause_s: float = 0) -> Progress:
    return assess_job(dict(enumerate(ranks)), hang_after_s=hang_after_s, usual_pause_s=usual_pause_s).state


@pytest.mark.parametrize(
    ("quiet_s", "state"), [(0, "progressing"), (5, "progressing"), (6, "slow"), (59, "slow"), (60, "stalled")]
)
def test_a_job_is_slow_before_it_is_stalled_after_hang_after(quiet_s: float, state: str) -> None:
    assert state_of(RankProgress(quiet_s=quiet_s), RankProgress(quiet_s=99, waits=True)) == state


def test_a_job_is_as_far_as_its_furthest_rank_and_each_rank_has_its_state() -> None:
    ranks = {0: RankProgress(quiet_s=1), 1: RankProgress(quiet_s=70, waits=True)}
    job = assess_job(ranks, hang_after_s=60, usual_pause_s=0)
    assert (job.state, job.ranks) == (Progress.PROGRESSING, {0: Progress.PROGRESSING, 1: Progress.STALLED})


def test_a_rank_at_its_first_step_may_take_five_times_as_long_unless_it_waits_itself() -> None:
    waiting = RankProgress(quiet_s=299, waits=True, phase=RankPhase.FIRST_STEP)
    assert state_of(RankProgress(quiet_s=299, phase=RankPhase.FIRST_STEP), waiting) == "slow"
    at_work, waits = RankProgress(quiet_s=300, phase=RankPhase.FIRST_STEP), RankProgress(quiet_s=300, waits=True)
    assert state_of(at_work, waits) == "stalled"
    assert state_of(waiting, waiting) == "stalled"


@pytest.mark.parametrize("phase", [RankPhase.CHECKPOINT, RankPhase.EVALUATION, RankPhase.COMPILE])
def test_phases_that_may_take_long_stall_nobody(phase: RankPhase) -> None:
    assert state_of(RankProgress(quiet_s=9999, phase=phase), RankProgress(quiet_s=9999, waits=True)) == "slow"


def test_without_hang_after_ten_seconds_stand_in_and_the_reason_says_so() -> None:
    threshold = stall_threshold(hang_after_s=0, usual_pause_s=0)
    assert (threshold.seconds, threshold.reason) == (10, "10 s, as no --hang-after is given")


def test_ten_usual_pauses_count_where_they_are_longer_and_at_most_ten_times_hang_after() -> None:
    assert stall_threshold(hang_after_s=10, usual_pause_s=3.5).seconds == 35
    assert stall_threshold(hang_after_s=10, usual_pause_s=3.5).reason == ("10 times the usual pause of this job, 3.5 s")
    assert stall_threshold(hang_after_s=10, usual_pause_s=99).seconds == 100
    assert stall_threshold(hang_after_s=60, usual_pause_s=3.5).seconds == 60


def test_pauses_are_the_intervals_without_progress_between_those_with_some() -> None:
    pauses = Pauses()
    # Progress at 0, 4.5, 9 ... s: eight whole intervals of half a second lie between each two.
    steps = [9 * step for step in range(MIN_PAUSES + 1)]
    pauses.add(steps[:-1])
    assert pauses.usual_s == 0, "one too few to tell"
    pauses.add([*steps, steps[-1]])
    assert pauses.usual_s == 8 * INTERVAL_NS / S == 4.0


def test_phases_are_distinguished_from_what_a_rank_is_in() -> None:
    assert phase_of(("forward",), steps=0) == RankPhase.FIRST_STEP
    assert phase_of((), steps=0) == RankPhase.STEPS
    assert phase_of(("forward",), steps=3) == RankPhase.STEPS
    assert phase_of(("evaluation", "forward"), steps=0) == RankPhase.EVALUATION


def test_a_job_that_was_stopped_had_stalled_where_it_paused_for_twice_as_long_as_ever() -> None:
    assert had_stalled(quiet_ns=12 * S, longest_pause_ns=1 * S)
    assert not had_stalled(quiet_ns=12 * S, longest_pause_ns=6 * S)
    assert not had_stalled(quiet_ns=5 * S, longest_pause_ns=0)


def test_words_name_the_state_the_threshold_and_its_reason() -> None:
    job = assess_job({0: RankProgress(quiet_s=61)}, hang_after_s=60, usual_pause_s=0)
    assert job.words == "stalled: no rank has made progress for 61 s (stall threshold 60 s: --hang-after 60)"
