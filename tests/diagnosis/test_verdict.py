"""Verdicts on jobs built by hand: what several rules, or none, make of them. Tests of one rule are in `rules/`."""

import signal
from dataclasses import replace

from dtprof.records import events
from dtprof.records.sites import Site
from dtprof.report.documents.verdict_json import verdict_json
from dtprof.report.text.verdict_text import MAX_LINES, verdict_text
from tests.builders import START_NS, RankBuilder
from tests.diagnosis.judging import (
    gradients,
    judge,
    loss,
    ranks_in_step,
    skipping_ranks,
    waiting_in_a_second_init,
    with_loaders,
)


def test_a_run_that_ended_in_order_is_healthy() -> None:
    verdict = judge(ranks_in_step(3, 4), exit_status=0, stalled=False, statuses=dict.fromkeys(range(3), (0, 9000)))
    assert (verdict.outcome, verdict.findings, verdict.cannot_tell) == ("healthy", (), ())


def test_an_abort_of_the_back_end_inside_the_misplaced_operation_is_a_consequence_of_the_skip() -> None:
    ranks = skipping_ranks()
    statuses = {0: (1, 7000), 1: (-signal.SIGABRT, 6500), 2: (-15, 7100), 3: (-15, 7100)}
    finding = judge(ranks, statuses=statuses).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (2,))
    assert any("SIGABRT" in fact for fact in finding.evidence)


def test_ranks_that_all_wait_in_init_do_not_find_each_other() -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        rank.span("init_process_group", 10, site=rank.site("", line=3))
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert reason.startswith("all 2 ranks wait in init_process_group and none is missing")
    assert reason.endswith("rank 0 at /home/me/train.py:3 (main); rank 1 at /home/me/train.py:3 (main)")


def test_a_rank_that_could_not_connect_in_init_is_not_stuck_and_its_error_is_reported() -> None:
    ranks = waiting_in_a_second_init(closed=False)
    message = "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused"
    ranks[0].exception(3500, message=message, line=3)
    verdict = judge(ranks, exit_status=1, statuses={0: (1, 4000), 1: (-15, 4100)})
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert verdict.cannot_tell[0].startswith(f"rank 0 lost a peer (RuntimeError: {message} at ")


def test_ranks_that_are_all_in_a_second_init_hang_without_a_culprit() -> None:
    ranks = waiting_in_a_second_init(closed=False)
    ranks[0].span("init_process_group", 3000, site=ranks[0].site("", line=12))
    verdict = judge(ranks, exit_status=None)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-never-joined", ())


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


def test_what_finds_no_room_in_the_text_is_counted() -> None:
    verdict = judge(skipping_ranks(), exit_status=None)
    finding = replace(verdict.findings[0], evidence=tuple(f"fact {i}" for i in range(6)))
    roomy = verdict_text(replace(verdict, findings=(finding,)))
    assert "fact 5" in roomy
    assert "not shown" not in roomy
    # Of three findings the first is shown whole but for some evidence, the others by summary and kind.
    full = verdict_text(replace(verdict, findings=(finding,) * 3)).splitlines()
    assert len(full) <= MAX_LINES
    assert [sum(text in line for line in full) for text in ("kind: ", "culprit: ", "fact 4")] == [3, 1, 0]
    assert (
        full[-1]
        == f"not shown: {3 * len(roomy.splitlines()[1:]) - len(full[1:-1])} more lines: see --json or the report"
    )


def test_a_fault_beside_the_first_is_summed_up_at_least_and_more_are_named() -> None:
    verdict = judge(skipping_ranks(), exit_status=None)
    finding = replace(verdict.findings[0], evidence=tuple(f"fact {i}" * 9 for i in range(6)))
    other = replace(finding, kind="rank-stuck", summary="Rank 3 is stuck.", culprit_ranks=(3,))
    text = verdict_text(replace(verdict, findings=(finding, *[other] * 8)))
    assert text.count("Rank 3 is stuck.\n  kind: rank-stuck, ") >= 2
    assert "more findings (rank-stuck of rank 3, rank-stuck of rank 3, ...)" in text
    assert len(text.splitlines()) <= MAX_LINES


def test_lines_of_places_are_wrapped_as_all_others() -> None:
    verdict = judge(skipping_ranks(), exit_status=None)
    site = Site(file=f"/home/user/{'train/' * 8}step.py", line=10, function="average_gradients_of_the_last_batch")
    finding = replace(verdict.findings[0], culprit_call_sites={2: site}, call_sites=dict.fromkeys((0, 1, 3), site))
    lines = verdict_text(replace(verdict, findings=(finding,))).splitlines()
    assert max(map(len, lines)) <= 100
    culprit = next(i for i, line in enumerate(lines) if line.startswith("  culprit: "))
    assert lines[culprit + 1] == " " * len("  culprit: ") + "(average_gradients_of_the_last_batch)"


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


def test_where_events_were_dropped_batches_and_groups_are_compared_but_not_counted() -> None:
    ranks = with_loaders([1, 3, 2], exhausted=[False, True, False])  # of what rank 0 took, most was dropped
    ranks[0].dropped_events = 100
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("uneven-inputs", (1,))
    assert finding.summary.startswith("Rank 1 ran out of batches, and left the loop")
    assert "the number of batches of each rank is unknown" in finding.evidence[0]

    ranks = ranks_in_step(3, 1)
    ranks[2].dropped_events = 100
    for rank in ranks[:2]:
        rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    for i in range(3):  # kept by chance
        ranks[2].span(events.NEW_GROUP, 1100 + 10 * i, 1105 + 10 * i, site=ranks[2].site(line=60))
    loss(ranks[2], 1200, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (2,), (0, 1))
    assert not any("made" in fact for fact in finding.evidence)


def test_an_operation_of_a_group_that_the_records_have_lost_is_no_error() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.op("all_reduce", 1200, group=7, site=rank.site("all_reduce", line=70))
    assert judge(ranks, exit_status=None).outcome in ("hang", "unknown")


def test_nothing_is_skipped_yet_by_a_rank_of_a_job_that_goes_on() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        late = rank.rank == 1
        for t in (1000, 1200, 1400):
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, waits=None if late else (t + 1, t + 50), site=site)
        for i in range(1 if late else 2):
            rank.span(events.NEW_GROUP, 1500 + i, 1501 + i, site=rank.site(line=70 + i))
    assert judge(ranks, exit_status=None, stalled=False).findings == ()
    kinds_at_the_end = {finding.kind for finding in judge(ranks, exit_status=0, stalled=False).findings}
    assert kinds_at_the_end == {"unwaited-async", "group-creation-mismatch"}
