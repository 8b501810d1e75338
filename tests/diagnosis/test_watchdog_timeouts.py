"""NCCL's watchdog in logs of torch 1.11 to 2.11: who is blamed, and when nobody is."""

import pytest

from tests.diagnosis import log_texts as texts
from tests.diagnosis.log_texts import Diagnose


@pytest.mark.parametrize(
    ("form", "line"),
    [(texts.STATUS_23, 563), (texts.STATUS_24, 607), (texts.STATUS_26, 629)],
)
def test_the_only_silent_rank_of_the_default_group_is_suspected(diagnose_texts: Diagnose, form: str, line: int) -> None:
    ranks = (0, 1, 3)
    lines = [texts.watchdog(r, line=line) + "\n" + texts.status(form, r) for r in ranks]
    verdict = diagnose_texts("\n".join(lines))
    (finding,) = verdict.findings
    assert verdict.outcome == "hang"
    assert finding.kind == "rank-skipped-collective"
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((2,), ranks)
    assert (finding.op, finding.seq) == ("all_reduce", 40)
    assert finding.confidence <= 0.6
    assert verdict.cannot_tell


def test_torch_1_11_lines_without_rank_in_front_count(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("\n".join(texts.older_watchdog(r, line=717) for r in (3, 1, 2)))
    (finding,) = verdict.findings
    assert finding.culprit_ranks == (0,)
    assert (finding.op, finding.seq) == ("broadcast", 40)


def test_one_waiting_rank_names_no_culprit(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts(texts.watchdog(5) + "\n" + texts.status(texts.STATUS_26, 5))
    (finding,) = verdict.findings
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((), (5,))
    assert finding.confidence < 0.5
    assert "silent" in " ".join(verdict.cannot_tell)


def test_most_ranks_silent_names_no_culprit(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("\n".join(texts.watchdog(r) for r in (1, 5, 7)))
    assert verdict.findings[0].culprit_ranks == ()


def test_members_of_a_subgroup_are_not_guessed(diagnose_texts: Diagnose) -> None:
    lines = []
    for rank, group_rank in ((4, 0), (5, 1), (7, 3)):
        form = texts.STATUS_23.replace("[PG {pg} Rank {rank}]", f"[PG 3 Rank {group_rank}]")
        lines += [texts.watchdog(rank), texts.status(form, rank)]
    verdict = diagnose_texts("\n".join(lines))
    assert verdict.findings[0].culprit_ranks == ()
    assert verdict.findings[0].group is not None
    assert verdict.findings[0].group.name == "3"


def test_sequence_numbers_of_unnamed_groups_are_not_compared(diagnose_texts: Diagnose) -> None:
    lines = [texts.older_watchdog(0, seq=96117), texts.older_watchdog(1, seq=96117), texts.older_watchdog(3, seq=64088)]
    verdict = diagnose_texts("\n".join(lines))
    assert verdict.findings[0].culprit_ranks == ()
    assert verdict.findings[0].seq is None


def test_rank_that_says_it_had_not_enqueued_is_behind(diagnose_texts: Diagnose) -> None:
    lines = [texts.watchdog(r) + "\n" + texts.status(texts.STATUS_26, r) for r in (0, 1, 2)]
    lines.append(texts.status(texts.DUMP, 3, enqueued=39, done=39))
    verdict = diagnose_texts("\n".join(lines))
    (finding,) = verdict.findings
    assert finding.culprit_ranks == (3,)
    assert finding.confidence >= 0.6
    assert "stuck inside" in " ".join(verdict.cannot_tell)


def test_other_operation_at_the_same_place_of_a_named_group_is_a_mismatch(diagnose_texts: Diagnose) -> None:
    lines = [texts.watchdog(r) + "\n" + texts.status(texts.STATUS_26, r) for r in (0, 1, 3)]
    lines.append(texts.watchdog(2, op="BROADCAST") + "\n" + texts.status(texts.STATUS_26, 2))
    (finding,) = diagnose_texts("\n".join(lines)).findings
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (2,))


def test_other_size_at_the_same_place_is_a_mismatch(diagnose_texts: Diagnose) -> None:
    lines = [texts.watchdog(r) + "\n" + texts.status(texts.STATUS_26, r) for r in (0, 1, 3)]
    lines.append(texts.watchdog(2, numel=1000) + "\n" + texts.status(texts.STATUS_26, 2))
    (finding,) = diagnose_texts("\n".join(lines)).findings
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (2,))


def test_all_ranks_in_the_same_operation_is_no_ranks_fault(diagnose_texts: Diagnose) -> None:
    lines = ["init: world_size=4", *[texts.watchdog(r) + "\n" + texts.status(texts.STATUS_26, r) for r in range(4)]]
    (finding,) = diagnose_texts("\n".join(lines)).findings
    assert (finding.kind, finding.culprit_ranks) == ("backend-stall", ())


def test_time_far_above_the_limit_is_a_host_that_stood_still(diagnose_texts: Diagnose) -> None:
    lines = [texts.watchdog(r).replace("600042", "25600042") for r in (1, 2, 3)]
    verdict = diagnose_texts("\n".join(lines))
    assert verdict.findings[0].culprit_ranks == ()
    assert "suspended" in " ".join(verdict.cannot_tell)


def test_messages_between_two_ranks_name_no_culprit(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("\n".join(texts.watchdog(r, op="COALESCED", numel=0) for r in (1, 2, 3)))
    assert verdict.findings[0].culprit_ranks == ()


def test_group_rank_in_an_unprefixed_line_is_no_global_rank(diagnose_texts: Diagnose) -> None:
    lines = [texts.watchdog(r).replace(f"[Rank {r}]", f"[Rank {r - 4}]") for r in (5, 6, 7)]
    lines.append("  what():  [Rank 1] Watchdog caught" + texts.watchdog(5).partition("Watchdog caught")[2])
    (finding,) = diagnose_texts("\n".join(lines)).findings
    assert finding.waiting_ranks == (5, 6, 7)


def test_same_place_in_every_attempt_is_the_program(diagnose_texts: Diagnose) -> None:
    attempt = "\n".join(texts.watchdog(r) + "\n" + texts.status(texts.STATUS_26, r) for r in (0, 1, 3))
    restart = "\n[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    (finding,) = diagnose_texts(attempt + restart + attempt).findings
    assert finding.culprit_ranks == (2,)
    assert any("the same in both attempts" in fact for fact in finding.evidence)
    assert finding.advice[0].startswith("Fix the program")


def test_stuck_watchdog_is_the_ranks_own_and_less_sure(diagnose_texts: Diagnose) -> None:
    line = (
        "[rank3]:[F1121 10:00:00.1 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring collectives."
    )
    (finding,) = diagnose_texts(line).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (3,))
    assert finding.confidence < 0.5


def test_wrapped_and_glued_lines_are_read(diagnose_texts: Diagnose) -> None:
    whole = texts.watchdog(1)
    cut = whole.index("NumelIn")
    glued = "Epoch 3:  45%|####      | 12/100 [00:10<00:12, 1.2it/s]" + texts.watchdog(0)
    text = "\n".join([glued, whole[:cut], whole[cut:], texts.watchdog(3)])
    (finding,) = diagnose_texts(text).findings
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((2,), (0, 1, 3))


def test_logs_of_several_files_are_one_job(diagnose_texts: Diagnose) -> None:
    (finding,) = diagnose_texts(texts.watchdog(0) + "\n" + texts.watchdog(1), texts.watchdog(3)).findings
    assert finding.culprit_ranks == (2,)
