"""Verdicts on runs built by hand: for every kind one that triggers it, and one that must not."""

import signal
from dataclasses import replace

import pytest

from dtprof.diagnosis.findings import rank_list
from dtprof.diagnosis.job_state import Stack
from dtprof.records.tables import Site
from dtprof.report.documents.verdict_json import verdict_json
from dtprof.report.text.verdict_text import verdict_text
from tests.builders import START_NS, RankBuilder
from tests.diagnosis.judging import CONNECTION_LOST, STEP, gradients, judge, loss, ranks_in_step


def test_a_run_that_ended_in_order_is_healthy() -> None:
    verdict = judge(ranks_in_step(3, 4), exit_status=0, stalled=False, statuses=dict.fromkeys(range(3), (0, 9000)))
    assert (verdict.outcome, verdict.findings, verdict.cannot_tell) == ("healthy", (), ())


def test_the_rank_that_raised_is_blamed_and_not_those_that_lost_their_peer() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2050, "ValueError", "bad sample 17", line=33)
    for victim in (ranks[0], ranks[2]):
        gradients(victim, 2000, done=False)
        victim.exception(2300, "RuntimeError", CONNECTION_LOST)
    verdict = judge(ranks, statuses=dict.fromkeys(range(3), (1, 3000)))
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-crashed", (1,))
    assert finding.waiting_ranks == (0, 2)
    assert finding.culprit_call_sites[1].line == 33
    assert (finding.op, finding.seq) == ("all_reduce", 4)
    assert "ValueError: bad sample 17" in finding.summary


def test_an_exception_raised_while_the_loss_of_a_peer_was_handled_is_a_consequence() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2100, "ZeroDivisionError", line=77)
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 2000, done=False)
        rank.exception(2050, "ValueError", "the step failed", line=90)  # the clock of the hosts may differ
        (error,) = rank.exceptions
        chain = (
            f"RuntimeError: {CONNECTION_LOST}\n\nThe above exception was the direct cause of the following exception:"
        )
        rank.exceptions[0] = replace(error, traceback=f"{chain}\n\n{error.traceback}")
    finding = judge(ranks, statuses={0: (1, 2300), 1: (1, 2200), 2: (1, 2300)}).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-crashed", (1,), (0, 2))


def test_a_connection_that_is_none_of_the_job_is_the_fault_of_the_rank_that_lost_it() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2100, "ConnectionRefusedError", "[Errno 111] Connection refused", line=77)
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 2000, done=False)
        rank.exception(2150, "RuntimeError", CONNECTION_LOST, line=10)
    finding = judge(ranks, statuses={0: (1, 2300), 1: (1, 2200), 2: (1, 2300)}).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-crashed", (1,), (0, 2))


def test_the_same_exception_on_every_rank_blames_every_rank() -> None:
    ranks = ranks_in_step(2, 1)
    for rank in ranks:
        rank.exception(1000 + rank.rank, "KeyError", "'input'", line=5)
    assert judge(ranks, statuses={0: (1, 2000), 1: (1, 2000)}).findings[0].culprit_ranks == (0, 1)


def test_a_rank_that_ends_with_a_status_and_no_exception_has_crashed() -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    finding = judge(ranks, statuses={0: (-15, 4000), 1: (3, 2500)}).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    assert "exit status 3" in finding.summary


def test_the_killed_rank_is_named_with_its_signal() -> None:
    ranks = ranks_in_step(4, 2)
    for victim in ranks[:3]:
        gradients(victim, 2000, done=False)
        victim.exception(2200, "RuntimeError", CONNECTION_LOST)
    statuses = {0: (1, 2600), 1: (-15, 2700), 2: (1, 2600), 3: (-signal.SIGKILL, 2500)}
    finding = judge(ranks, statuses=statuses).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-killed", (3,), (0, 1, 2))
    assert "SIGKILL" in finding.summary


def test_the_oom_killer_is_named_where_the_cgroup_counted_it() -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    finding = judge(ranks, statuses={0: (-15, 3000), 1: (-9, 2500)}, oom_kills=1).findings[0]
    assert any("OOM killer" in fact for fact in finding.evidence)


@pytest.mark.parametrize(
    ("resident", "said"),
    [
        ({0: 2**28, 1: 3 * 2**29, 2: 2**28, 3: 2**30}, ["1.50 GiB", "256 MiB"]),
        ({0: 2**28, 1: 2**30, 2: 2**29}, ["1.00 GiB", "256 MiB to 512 MiB"]),
        ({1: 2**30}, ["1.00 GiB"]),  # no other was sampled
        ({0: 2**30}, []),  # the rank itself was not
    ],
)
def test_what_a_rank_held_is_told_beside_the_ranks_of_its_host(resident: dict[int, int], said: list[str]) -> None:
    ranks = ranks_in_step(4, 2)
    ranks[3].host = "elsewhere"
    for victim in (ranks[0], ranks[2], ranks[3]):
        gradients(victim, 2000, done=False)
    statuses = {rank: (-9 if rank == 1 else -15, 2500 + 10 * (rank != 1)) for rank in range(4)}
    finding = judge(ranks, statuses=statuses, oom_kills=1, resident=resident).findings[0]
    assert finding.culprit_ranks == (1,)
    words = zip(("rank 1 held {} in RAM when last sampled", "the other ranks of its host {}"), said, strict=False)
    told = ", ".join(text.format(size) for text, size in words)
    assert [fact for fact in finding.evidence if "RAM" in fact] == ([told] if told else [])


def test_a_victim_that_aborts_after_its_exception_does_not_hide_the_rank_that_left() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[2].closed = True
    for victim in ranks[:2]:
        gradients(victim, 2000, done=False)
        victim.exception(2200, "RuntimeError", CONNECTION_LOST)
    finding = judge(ranks, statuses={0: (-signal.SIGABRT, 2600), 1: (-15, 2700), 2: (0, 2100)}).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (2,), (0, 1))


def test_a_rank_that_left_with_status_0_while_others_wait_is_named() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[0].closed = True
    for waiting in ranks[1:]:
        gradients(waiting, 2000, done=False)
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-exited")
    assert verdict.findings[0].culprit_ranks == (0,)


@pytest.mark.parametrize(("end", "kind"), [(2050, "rank-exited"), (3_000_000_000, None)])
def test_a_rank_that_ended_before_others_lost_a_peer_has_left_also_where_no_operation_is_seen_to_fail(
    end: int, kind: str | None
) -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].closed = True
    ranks[1].span("data", end - 10, end)
    for rank in (ranks[0], ranks[2]):
        rank.exception(2100, "RuntimeError", CONNECTION_LOST, line=10)
    verdict = judge(ranks, statuses={0: (1, 2300), 1: (0, end + 100), 2: (1, 2300)}, stalled=False)
    assert [(f.kind, f.culprit_ranks) for f in verdict.findings] == ([(kind, (1,))] if kind else [])


def test_a_rank_that_ended_first_after_all_its_collectives_is_not_blamed() -> None:
    ranks = ranks_in_step(2, 2)
    ranks[0].closed = True  # rank 1 is still in its last all_reduce, which rank 0 has made
    last = ranks[1]
    site = last.site("all_reduce", line=20, function="average_loss")
    last.op("all_reduce", 1400, None, returned=1401, site=site, nbytes=8, seq=3)
    verdict = judge(ranks, exit_status=None, stalled=False)
    assert (verdict.outcome, verdict.findings) == ("healthy", ())


def skipping_ranks(world_size: int = 4, culprit: int = 2) -> list[RankBuilder]:
    """Return ranks of which one goes on to the next step without the loss all_reduce of step 5."""
    ranks = ranks_in_step(world_size, 5)
    for rank in ranks:
        rank.span("backward", 5000, 5200)
        gradients(rank, 5000, done=True)
        rank.span("optimizer", 5300, 5310)
        if rank.rank == culprit:
            rank.span("backward", 6000)
            gradients(rank, 6000, done=False)
        else:
            loss(rank, 5000, done=False)
    return ranks


def test_a_skipped_collective_is_found_where_the_next_one_of_the_same_group_takes_its_place() -> None:
    verdict = judge(skipping_ranks(), exit_status=None)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-skipped-collective", (2,))
    assert (finding.waiting_ranks, finding.op, finding.seq) == ((0, 1, 3), "all_reduce", 11)
    assert {site.line for site in finding.call_sites.values()} == {20}
    assert finding.culprit_call_sites[2].line == 10


def test_a_skipped_collective_is_found_among_two_ranks_by_what_they_did_before() -> None:
    finding = judge(skipping_ranks(world_size=2, culprit=1), exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))


def test_a_skipped_collective_of_a_group_of_its_own_is_found() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        own = rank.group("1", range(3), "loss")
        backward, average = rank.site("Tensor.backward", line=10), rank.site("all_reduce", line=20)
        for step in range(4):
            t = step * STEP
            skipped = step == 3 and rank.rank == 0
            rank.op("all_reduce", t + 100, t + 150, site=backward, nbytes=64)
            if not skipped:
                rank.op(
                    "all_reduce", t + 400, None if step == 3 else t + 450, returned=t + 401, site=average, group=own
                )
            else:
                rank.op("all_reduce", t + 1100, None, returned=t + 1101, site=backward, nbytes=64)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (0,), (1, 2))
    assert finding.group is not None
    assert (finding.group.description, finding.seq) == ("loss", 3)


def test_an_abort_of_the_back_end_inside_the_misplaced_operation_is_a_consequence_of_the_skip() -> None:
    ranks = skipping_ranks()
    statuses = {0: (1, 7000), 1: (-signal.SIGABRT, 6500), 2: (-15, 7100), 3: (-15, 7100)}
    finding = judge(ranks, statuses=statuses).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (2,))
    assert any("SIGABRT" in fact for fact in finding.evidence)


def test_a_rank_that_is_only_late_is_not_said_to_have_skipped() -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[:2]:
        gradients(rank, 3000, done=False)
    asleep = Stack(state="sleeping", cpu_share=0.0, frames=(Site(file="/home/me/train.py", line=77, function="load"),))
    finding = judge(ranks, exit_status=None, stacks={2: asleep}).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (2,))
    assert finding.culprit_call_sites[2].line == 77


def test_a_stopped_process_is_frozen() -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        gradients(rank, 3000, done=False)
    stopped = Stack(state="stopped", cpu_share=0.0, frames=(), reason="the process is stopped")
    finding = judge(ranks, exit_status=None, stacks={0: stopped}).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-frozen", (0,))


@pytest.mark.parametrize("phase", ["checkpoint", "compile"])
def test_a_long_checkpoint_or_compilation_is_a_warning_and_not_a_hang(phase: str) -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].span(phase, 3100)
    gradients(ranks[1], 3000, done=False)
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings[0].kind) == ("slow", "long-operation")
    assert verdict.findings[0].severity == "warning"


@pytest.mark.parametrize(
    ("state", "kind"), [("running", "long-operation"), ("sleeping", "rank-stuck"), ("stopped", "rank-frozen")]
)
def test_a_long_evaluation_is_one_where_the_rank_works(state: str, kind: str) -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].span("evaluation", 3100)
    gradients(ranks[1], 3000, done=False)
    stack = Stack(state=state, cpu_share=0.0, frames=(), reason="no frames")
    finding = judge(ranks, exit_status=None, stacks={0: stack}).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))


@pytest.mark.parametrize(
    ("steps", "state", "phase", "early"),
    [
        (0, "running", "forward", True),
        (0, "running", None, False),
        (0, "sleeping", "forward", False),
        (2, "running", "forward", False),
    ],
)
def test_a_rank_that_works_in_its_first_step_is_marked(steps: int, state: str, phase: str | None, early: bool) -> None:
    ranks = ranks_in_step(2, steps)
    if phase is not None:
        ranks[0].span(phase, 1000 * steps + 100)
    gradients(ranks[1], 1000 * steps + 50, done=False)
    stack = Stack(state=state, cpu_share=0.0, frames=(), reason="no frames")
    finding = judge(ranks, exit_status=None, stacks={0: stack}).findings[0]
    assert (finding.kind, finding.in_first_step) == ("rank-stuck", early)


def test_another_operation_at_the_same_position_is_an_order_mismatch() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        if rank.rank == 1:
            rank.op("barrier", 2100, None, returned=2101, site=rank.site("barrier", line=50))
        else:
            gradients(rank, 2000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (1,))
    assert finding.culprit_call_sites[1].line == 50


def test_different_roots_are_named() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        root = 2 if rank.rank == 0 else 1
        rank.op("broadcast", 1100, None, returned=1101, peer=root, site=rank.site("broadcast", line=60), nbytes=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("root-mismatch", (0,))


@pytest.mark.parametrize(("ended", "kinds"), [(2900, []), (2_000_000_000, ["backend-stall"])])
def test_ranks_stopped_as_soon_as_all_had_come_may_have_gone_on(ended: int, kinds: list[str]) -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=False)
    verdict = judge(ranks, exit_status=1, statuses=dict.fromkeys(range(3), (-15, ended)))
    assert [finding.kind for finding in verdict.findings] == kinds
    assert verdict.outcome == ("hang" if kinds else "unknown")
    assert kinds or "stopped from outside" in verdict.cannot_tell[0]


def test_all_members_in_and_none_done_is_a_stall_of_the_back_end() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("backend-stall", (), (0, 1, 2))


def test_ranks_without_a_record_never_joined_while_others_wait_in_init() -> None:
    ranks = [RankBuilder(rank, 4, closed=False) for rank in (0, 1, 3)]
    for rank in ranks:
        rank.span("init_process_group", 10, site=rank.site("", line=3))
    verdict = judge(ranks, exit_status=None)
    finding = verdict.findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-never-joined", (2,))
    assert verdict.ranks_missing == (2,)


def test_ranks_that_all_wait_in_init_do_not_find_each_other() -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        rank.span("init_process_group", 10, site=rank.site("", line=3))
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert reason.startswith("all 2 ranks wait in init_process_group and none is missing")
    assert reason.endswith("rank 0 at /home/me/train.py:3 (main); rank 1 at /home/me/train.py:3 (main)")


def test_of_two_calls_at_one_position_the_one_made_for_the_first_time_is_the_wrong_one() -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].op("barrier", 3100, site=ranks[0].site("barrier", line=50))
    gradients(ranks[1], 3000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("collective-order-mismatch", (0,), (1,))
    assert finding.culprit_call_sites[0].line == 50
    assert finding.confidence == 0.75


def test_of_two_calls_that_both_are_new_neither_is_known_to_be_wrong() -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].op("barrier", 3100, site=ranks[0].site("barrier", line=50))
    ranks[1].op("all_reduce", 3100, site=ranks[1].site("all_reduce", line=60), nbytes=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.confidence) == ("collective-order-mismatch", 0.6)
    assert any("guess" in fact for fact in finding.evidence)


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_in_calls_that_follow_each_other_in_a_loop_the_one_ahead_by_the_steps_skipped(
    culprit: int,
) -> None:
    # Tokens and gradients on the default group, then the optimizer, with which a step ends, then the loss on its own.
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        group = rank.group("loss", (0, 1))
        tokens, rebuild, gradient, mean = (rank.site("all_reduce", line=line) for line in (5, 7, 10, 20))
        for step in range(5):
            t, is_last = 1000 * step, step == 4
            rank.op("all_reduce", t, t + 10, site=tokens, step=step, nbytes=8)
            if step == 1:
                rank.op("all_reduce", t + 20, t + 30, site=rebuild, step=step, nbytes=64)
            skips = is_last and rank.rank == culprit
            if not skips:
                done = None if is_last else t + 150
                rank.op("all_reduce", t + 100, done, site=gradient, step=step, nbytes=4096)
            if skips or not is_last:  # the culprit is the first to wait
                begun, done = (t + 90, None) if is_last else (t + 400, t + 450)
                rank.op("all_reduce", begun, done, site=mean, step=step + 1, group=group, nbytes=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (culprit,))
    assert finding.call_sites[1 - culprit].line == 10


def waiting_in_a_second_init(*, closed: bool) -> list[RankBuilder]:
    """Return two ranks that took two steps; then rank 1 joins a second job, and rank 0 does something else or ends."""
    ranks = ranks_in_step(2, 2)
    ranks[0].closed, ranks[1].closed = closed, False
    ranks[1].span("init_process_group", 3000, site=ranks[1].site("", line=12))
    return ranks


def test_rank_that_is_stuck_while_another_waits_in_a_later_init_is_named_with_its_line() -> None:
    place = Site(file="/home/me/train.py", line=21, function="train")
    stack = Stack(state="sleeping", cpu_share=0.0, frames=(place,))
    verdict = judge(waiting_in_a_second_init(closed=False), exit_status=None, stacks={0: stack})
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind) == ("hang", "rank-stuck")
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((0,), (1,))
    assert (finding.culprit_call_sites[0].line, finding.call_sites[1].line) == (21, 12)
    assert "in init_process_group" in finding.summary
    assert any("destroy_process_group" in advice for advice in finding.advice)


def test_rank_that_ended_while_another_waits_in_a_later_init_has_exited() -> None:
    finding = judge(waiting_in_a_second_init(closed=True), exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (0,), (1,))


def test_a_rank_that_could_not_connect_in_init_is_not_stuck_and_its_error_is_told() -> None:
    ranks = waiting_in_a_second_init(closed=False)
    message = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"
    ranks[0].exception(3500, message=message, line=3)
    verdict = judge(ranks, exit_status=1, statuses={0: (1, 4000), 1: (-15, 4100)})
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert verdict.cannot_tell[0].startswith(f"rank 0 lost a peer (RuntimeError: {message} at ")


def test_all_ranks_in_init_wait_for_nobody_that_the_records_know() -> None:
    ranks = waiting_in_a_second_init(closed=False)
    ranks[0].span("init_process_group", 3000, site=ranks[0].site("", line=12))
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())


def test_ranks_that_wait_for_some_without_records_say_for_whom_and_what_to_give() -> None:
    ranks = ranks_in_step(4, 2)[:2]
    for rank in ranks:
        gradients(rank, 2000, done=False)
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.ranks_missing) == ("unknown", (2, 3))
    assert "perhaps for ranks 2, 3, of which there is no record here" in verdict.cannot_tell[0]


def test_a_job_stopped_by_hand_says_that_it_cannot_tell() -> None:
    ranks = ranks_in_step(2, 2)
    verdict = judge(ranks, exit_status=-2, stalled=False, statuses={0: (-2, 2500), 1: (-2, 2500)})
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert "stopped from outside" in verdict.cannot_tell[0]


def test_ranks_that_dtprof_itself_stopped_are_not_blamed_for_their_signals() -> None:
    ranks = skipping_ranks()
    statuses = {0: (-15, 9000), 1: (-9, 9000), 2: (-9, 9000), 3: (-9, 9000)}
    verdict = judge(ranks, statuses=statuses, stopped_on_hang_ns=START_NS + 8000)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-skipped-collective")


def test_the_text_stays_under_25_lines_for_a_thousand_ranks() -> None:
    verdict = judge(skipping_ranks(world_size=300, culprit=7), exit_status=None)
    text = verdict_text(replace(verdict, cannot_tell=("a reason " * 40,) * 20))
    assert len(text.splitlines()) < 25
    assert "rank 7" in text.lower()


def test_the_json_has_every_field_of_the_contract() -> None:
    document = verdict_json(judge(skipping_ranks(), exit_status=None))
    assert list(document) == [
        "schema",
        "outcome",
        "source",
        "ranks_seen",
        "ranks_missing",
        "findings",
        "cannot_tell",
    ]
    finding = document["findings"][0]
    assert finding["group"] == {"name": "0", "description": "default_pg", "ranks": [0, 1, 2, 3]}
    assert finding["call_sites"]["0"] == {"file": "/home/me/train.py", "line": 20, "function": "average_loss"}
    assert finding["docs"] == finding["kind"] == "rank-skipped-collective"


def test_ranks_are_written_short() -> None:
    assert rank_list([2]) == "rank 2"
    assert rank_list([3, 0, 1]) == "ranks 0, 1, 3"
    assert rank_list(list(range(7))) == "ranks 0-6"
