"""Ranks called new_group a different number of times, and it went well."""

from collections.abc import Sequence

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.records import events
from tests.diagnosis.judging import build_job, judge, kinds_after_success, ranks_in_step


def making(*numbers: int) -> JobState:
    ranks = ranks_in_step(len(numbers), 1)
    for rank, number in zip(ranks, numbers, strict=True):
        for i in range(number):
            rank.span(events.NEW_GROUP, 1100 + i, 1101 + i, site=rank.site(line=70 + i))
    return build_job(ranks, exit_status=0, stalled=False)


def one_that_makes_fewer() -> JobState:
    return making(2, 2, 1)


def all_that_make_as_many() -> JobState:
    return making(2, 2, 2)


FAULTY = {"group-creation-mismatch": one_that_makes_fewer}
SOUND = all_that_make_as_many


@pytest.mark.parametrize(("made", "found"), [((1, 1, 1), []), ((2, 2, 1), ["group-creation-mismatch"])])
def test_a_group_that_not_all_ranks_made_is_a_risk_though_it_went_well(made: Sequence[int], found: list[str]) -> None:
    ranks = ranks_in_step(3, 1)
    for rank, number in zip(ranks, made, strict=True):
        for i in range(number):
            rank.span(events.NEW_GROUP, 1100 + i, 1101 + i, site=rank.site(line=70 + i))
    assert kinds_after_success(ranks) == found
    for finding in judge(ranks, exit_status=0, stalled=False).findings:
        assert (finding.severity, finding.culprit_ranks) == ("warning", (2,))
        assert {site.line for site in finding.call_sites.values()} == {71}
    ranks[2].dropped_events = 100  # it may have made the other one, too
    assert kinds_after_success(ranks) == []


MEMBERS = {"01": 11, "012": 12, "23": 13}
"""What stands for the members in the calls."""


@pytest.mark.parametrize(
    ("asked", "culprits"),
    [
        (("01", "01", "012", "01"), (2,)),
        (("01", "01", "01", "01"), None),
        (("01", "01", "23", "23"), None),  # each makes the group of its own
        (("01", "01", "23", "01"), (2,)),
    ],
)
def test_a_group_of_other_members_on_one_rank_is_a_risk_where_all_make_every_group(
    asked: Sequence[str], culprits: tuple[int, ...] | None
) -> None:
    ranks = ranks_in_step(4, 1)
    for rank, members in zip(ranks, asked, strict=True):
        rank.span(events.NEW_GROUP, 1100, 1101, site=rank.site(line=70), microbatch=MEMBERS[members])
        if rank.rank < 2:
            rank.op("all_reduce", 1200, 1209, group=rank.group("1", (0, 1)), site=rank.site("all_reduce", line=71))
    findings = judge(ranks, exit_status=0, stalled=False).findings
    assert [(f.kind, f.culprit_ranks) for f in findings] == (
        [("group-creation-mismatch", culprits)] if culprits else []
    )


@pytest.mark.parametrize(
    ("asked", "culprits"),
    [
        (("01 012", "012 01", "01 012"), (1,)),
        (("01 012", "01 012", "01 012"), None),
        (("01 012", "01 23", "01 012"), None),  # other groups: not another order
    ],
)
def test_groups_made_in_another_order_are_a_risk_where_they_connect_only_when_used(
    asked: Sequence[str], culprits: tuple[int, ...] | None
) -> None:
    ranks = ranks_in_step(3, 1)
    for rank, groups in zip(ranks, asked, strict=True):
        for i, members in enumerate(groups.split()):
            line = rank.site(line=70 + MEMBERS[members])  # each group has a line of its own
            rank.span(events.NEW_GROUP, 1100 + i, 1101 + i, site=line, microbatch=MEMBERS[members])
    findings = judge(ranks, exit_status=0, stalled=False).findings
    assert [finding.culprit_ranks for finding in findings] == ([culprits] if culprits else [])
