"""All others waited for one long checkpoint or compilation."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.records import events
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, judge_success, kinds_after_success, ranks_in_step

SECOND = 1_000_000_000


def checkpointing(seconds: int) -> list[RankBuilder]:
    """Return ranks that meet in a barrier after rank 0 wrote four parts, `seconds` in all."""
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        if rank.rank == 0:
            for part in range(4):
                at = SECOND + part * seconds * SECOND // 4
                rank.span(events.CHECKPOINT, at, at + seconds * SECOND // 4 - 1000)
        begin = SECOND + (seconds * SECOND if rank.rank == 0 else 5)
        rank.op("barrier", begin, SECOND + seconds * SECOND + 9)
    return ranks


def one_of_20_s() -> JobState:
    return build_job(checkpointing(20), exit_status=0, stalled=False)


def one_of_4_s() -> JobState:
    return build_job(checkpointing(4), exit_status=0, stalled=False)


FAULTY = {"long-operation": one_of_20_s}
SOUND = one_of_4_s


@pytest.mark.parametrize(("seconds", "found"), [(20, ["long-operation"]), (4, [])])
def test_checkpoints_in_a_row_that_all_others_wait_for_are_one_long_operation(seconds: int, found: list[str]) -> None:
    assert kinds_after_success(checkpointing(seconds)) == found


@pytest.mark.parametrize(("seconds", "found"), [(20, True), (4, False)])
def test_work_that_no_phase_names_lies_between_two_lines_and_the_others_wait_at_the_second(
    seconds: int, found: bool
) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        begin = SECOND * (1 + (seconds if rank.rank == 0 else 0))
        site = rank.site("barrier", line=30, function="evaluate")
        rank.op("barrier", begin, SECOND * (1 + seconds) + 9, site=site, step=3)
    findings = judge_success(ranks).findings
    assert [finding.kind for finding in findings] == ["long-operation"] * found
    for finding in findings:
        assert (finding.op, finding.seq, finding.step) == ("barrier", 6, 3)
        assert finding.group is not None
        assert {rank: site.line for rank, site in finding.call_sites.items()} == {1: 30, 2: 30}
        assert finding.culprit_call_sites == {}  # no stack was sampled
        assert finding.evidence[1] == (
            "rank 0 came to it from all_reduce at /home/me/train.py:20 (average_loss), and went on to barrier at "
            "/home/me/train.py:30 (evaluate)"
        )
