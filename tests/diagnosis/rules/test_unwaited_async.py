"""Handles of asynchronous operations that are dropped."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.records.rank_log.strings import Strings, names_in_tables
from dtprof.records.schema import FLAG
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, judge, kinds_after_success, message, pair, ranks_in_step


def handles_that_are_dropped() -> JobState:
    return build_job(dropping(), exit_status=0, stalled=False)


def handles_before_a_barrier() -> JobState:
    return build_job(dropping(barrier=True), exit_status=0, stalled=False)


FAULTY = {"unwaited-async": handles_that_are_dropped}
SOUND = handles_before_a_barrier


@pytest.mark.parametrize("waiting", [(True, False, True), (False, False, False), (True, True, True)])
def test_a_handle_is_said_to_be_dropped_only_where_others_wait_for_theirs(waiting: Sequence[bool]) -> None:
    ranks = ranks_in_step(3, 1)
    for rank, waits in zip(ranks, waiting, strict=True):
        for t in (1000, 1200):
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, waits=(t + 1, t + 50) if waits else None, site=site)
        rank.op("barrier", 1500, 1510)
    assert kinds_after_success(ranks) == (["unwaited-async"] if waiting == (True, False, True) else [])


@pytest.mark.parametrize(("waited", "is_found"), [("wwdd", True), ("wwwd", False), ("wdwd", False), ("wwww", False)])
def test_a_rank_that_stops_to_wait_for_good_drops_handles(waited: str, *, is_found: bool) -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        for number, letter in enumerate(waited):
            t, waits = 1000 + 100 * number, rank.rank != 1 or letter == "w"
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, waits=(t + 1, t + 50) if waits else None, site=site)
        rank.op("barrier", 1500, 1510)
    assert kinds_after_success(ranks) == (["unwaited-async"] if is_found else [])


@pytest.mark.parametrize(
    ("waited", "hook", "barrier", "is_found"),
    [
        ("wwwwdddw", "native", False, True),
        ("wwwdwwww", "native", True, False),
        ("wwwdwwww", "python", False, False),
        ("wwwwwwwd", "native", False, False),  # the newest may be waited for yet
    ],
)
def test_a_handle_is_dropped_where_a_later_one_of_its_round_is_waited_for(
    waited: str, hook: str, *, barrier: bool, is_found: bool
) -> None:
    ranks = [RankBuilder(rank, 3, hook=hook) for rank in range(3)]
    for rank in ranks:
        for number, letter in enumerate(waited):
            t, waits = 1000 + 100 * number, rank.rank != 1 or letter == "w"
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, waits=(t + 1, t + 50) if waits else None, site=site)
        if barrier:
            rank.op("barrier", 2000, 2010)
    assert kinds_after_success(ranks) == (["unwaited-async"] if is_found else [])


@pytest.mark.parametrize("lets_go", [0, 2])
def test_who_receives_a_broadcast_has_to_wait_for_it_and_who_sends_it_has_not(lets_go: int) -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        for t in (1000, 1200):
            waits = None if rank.rank == lets_go else (t + 1, t + 50)
            site = rank.site("broadcast", line=40)
            rank.op("broadcast", t, t + 50, is_async=True, waits=waits, site=site, peer=0)
    assert kinds_after_success(ranks) == (["unwaited-async"] if lets_go else [])


def dropping(*, flags: int = FLAG["completion"], barrier: bool = False, hook: str = "native") -> list[RankBuilder]:
    """Return ranks that average two tensors in each of three steps, and drop both handles."""
    ranks = [RankBuilder(rank, 3, hook=hook) for rank in range(3)]
    for rank in ranks:
        for step in range(3):
            t = 1000 * step
            for i in range(2):
                site = rank.site("all_reduce", line=40)
                rank.op("all_reduce", t + i, t + 50, is_async=True, step=step, site=site, flags=flags)
            if barrier:
                rank.op("barrier", t + 60, t + 70, step=step)
    return ranks


def test_handles_that_all_ranks_drop_are_named_with_their_line() -> None:
    finding = found_by("unwaited_async", build_job(dropping(), exit_status=0, stalled=False))[0]
    assert (finding.kind, finding.culprit_ranks) == ("unwaited-async", (0, 1, 2))
    assert {site.line for site in finding.culprit_call_sites.values()} == {40}
    assert "6 times" in finding.summary


@pytest.mark.parametrize("who_waits", ["nobody", "one of each group"])
def test_handles_of_one_line_that_several_groups_drop_are_one_finding(who_waits: str) -> None:
    ranks = pair(8)
    for rank in ranks:
        members = tuple(range(rank.rank // 4 * 4, rank.rank // 4 * 4 + 4))
        own = rank.group(f"row{rank.rank // 4}", members)
        for step in range(3):
            t = 1000 * step
            waits = (t + 1, t + 50) if who_waits != "nobody" and rank.rank % 4 else None
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, step=step, site=site, group=own, waits=waits)
    job = build_job(ranks, exit_status=0, stalled=False)
    findings = [finding for finding in decide(job).findings if finding.kind == "unwaited-async"]
    expected = tuple(range(8)) if who_waits == "nobody" else (0, 4)
    assert [finding.culprit_ranks for finding in findings] == [expected]


@pytest.mark.parametrize(("waited", "is_found"), [((2, 5, 8), True), ((2, 4, 8), False)])
def test_where_the_program_makes_no_steps_a_round_ends_with_the_handle_that_is_waited_for(
    waited: Sequence[int], *, is_found: bool
) -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for i in range(9):
            t, site = 100 * i, rank.site("all_reduce", line=40)
            waits = (t + 1, t + 50) if i in waited else None
            rank.op("all_reduce", t, t + 50, is_async=True, waits=waits, site=site)
    assert kinds_after_success(ranks) == (["unwaited-async"] if is_found else [])


def test_an_abort_at_the_end_of_the_interpreter_is_a_consequence_of_a_dropped_handle() -> None:
    verdict = judge(dropping(), statuses={1: (-6, 9000)}, exit_status=1, stalled=False)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "unwaited-async", (0, 1, 2))
    assert any("SIGABRT" in fact for fact in finding.evidence)


@pytest.mark.parametrize(("status", "is_usual"), [(-6, True), (-11, False)])
def test_a_signal_at_the_end_of_the_interpreter_is_reported_with_what_to_let_go_of(status: int, is_usual: bool) -> None:
    ranks = dropping(flags=FLAG["completion"] | FLAG["asked"])
    verdict = judge(ranks, statuses={1: (status, 9000)}, exit_status=1, stalled=False)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-killed", (1,))
    assert "while its interpreter shut down" in finding.summary
    assert any("asks for the GIL" in fact for fact in finding.evidence) == is_usual
    assert any("gc.collect()" in advice for advice in finding.advice)


def test_handles_asked_for_completion_or_covered_by_a_barrier_are_not_dropped() -> None:
    assert kinds_after_success(dropping(flags=FLAG["completion"] | FLAG["asked"])) == []
    assert kinds_after_success(dropping(barrier=True)) == []
    assert kinds_after_success(dropping(hook="python")) == []  # which does not see questions
    assert kinds_after_success(dropping(flags=FLAG["device"])) == []  # a stream may wait for it


@pytest.mark.parametrize("stalled", [True, False])
def test_receives_that_nobody_waits_for_explain_an_operation_that_all_came_to(stalled: bool) -> None:
    def findings(*, waited: bool) -> list[tuple[str, tuple[int, ...]]]:
        ranks = [RankBuilder(rank, 2, closed=not stalled) for rank in range(2)]
        for t in (100, 200, 300):
            message(ranks[0], "send", 1, t, t + 9, line=4)
            site = ranks[1].site("irecv", line=5, function="exchange")
            done = t + 9 if waited else None
            ranks[1].op("recv", t, done, returned=t + 1, peer=0, site=site, nbytes=8, is_async=True)
        for rank in ranks:
            rank.op("barrier", 400, None if stalled else 409, returned=401)
        status = None if stalled else 0
        found = judge(
            ranks, exit_status=status, stalled=stalled, statuses=None if stalled else dict.fromkeys(range(3), (0, 9000))
        ).findings
        return [(finding.kind, finding.culprit_ranks) for finding in found if finding.severity != "info"]

    assert findings(waited=False) == [("unwaited-async", (1,))]
    assert findings(waited=True) == ([("backend-stall", ())] if stalled else [])


@pytest.mark.parametrize(
    ("waited", "tag", "kind"),
    [
        (False, 0, "unwaited-async"),
        (True, 0, "rank-exited"),  # it has left, whatever else
        (False, 5, "rank-exited"),  # of another tag: not what the other waits for
    ],
)
def test_a_send_that_was_left_alone_explains_why_who_waits_for_it_waits(waited: bool, tag: int, kind: str) -> None:
    ranks = [RankBuilder(rank, 2, closed=rank == 0) for rank in range(2)]
    for t in (100, 200):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
    site = ranks[0].site("isend", line=6, function="exchange")
    waits = (302, 303) if waited else None
    ranks[0].op("send", 300, None, returned=301, peer=1, tag=tag, site=site, nbytes=8, is_async=True, waits=waits)
    message(ranks[1], "recv", 0, 300, line=7)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))
    if kind == "unwaited-async":
        assert (finding.culprit_call_sites[0].line, finding.call_sites[1].line) == (6, 7)
        assert "exited with status 0" in finding.evidence[-1]


USED_EARLY = (
    {"k": "op", "id": 0, "name": "allreduce_"},
    {"k": "site", "id": 1, "file": "train.py", "line": 7, "function": "main", "api": "all_reduce"},
    {"k": "site", "id": 2, "file": "train.py", "line": 9, "function": "main", "api": ""},
    {"k": "label", "id": 1, "api": "FSDP", "text": "fsdp all-gather"},
    {"k": "site", "id": 5, "of": 1, "label": 1},
    {"k": "group", "id": 0, "name": "0", "description": "default_pg", "size": 2, "rank": 0},
)


def used_early(site: int = 1, *more: dict[str, object], by: str = "aten::mul", used: int = 2) -> JobState:
    """Return a job of two ranks of which the second used a buffer before its wait, by the entries of its log."""
    strings = Strings()
    numbers = {"id": 1, "op": 0, "group": 0, "seq": 4, "site": site, "step": 2, "used": used}
    entry = {"k": "early_use", "t_ns": 50, "use": "written", "by": by, "dropped": False, **numbers}
    for row in (*USED_EARLY, entry, *more):
        strings.take(row)
    job = build_job(ranks_in_step(2, 1), exit_status=0, stalled=False)
    return replace(job, ranks=job.ranks | {1: replace(job.ranks[1], early_uses=names_in_tables(strings)["early_uses"])})


def test_a_buffer_used_before_its_wait_is_named_with_the_lines_of_call_and_use() -> None:
    (finding,) = found_by("unwaited_async", used_early(1, {"k": "early_use", "id": 1, "waited": True}))
    assert (finding.kind, finding.culprit_ranks, finding.op, finding.seq) == ("unwaited-async", (1,), "all_reduce", 4)
    assert (finding.culprit_call_sites[1].line, finding.call_sites[1].line) == (7, 9)
    assert "is written to at train.py:9 (main) before its wait" in finding.summary
    assert "aten::mul" in finding.evidence[0]
    assert "only afterwards" in finding.evidence[0]


def test_a_write_known_by_the_version_of_the_tensor_alone_advises_the_check_that_names_its_line() -> None:
    (finding,) = found_by("unwaited_async", used_early(by="", used=0))
    assert (finding.culprit_call_sites[1].line, finding.call_sites) == (7, {})
    assert any("--check handles" in advice for advice in finding.advice)


def test_a_buffer_that_a_framework_handles_itself_is_its_own() -> None:
    assert found_by("unwaited_async", used_early(site=5)) == []
