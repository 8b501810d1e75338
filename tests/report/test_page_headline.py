"""The verdict says what matters most, and only what the summary holds."""

import signal
from dataclasses import replace

import pytest

from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.analysis.results import PARTS, Advice, Caveat, Summary
from dtprof.records.nodes.sampled_lines import HotLine
from dtprof.report.pages.page_headline import write_headline
from dtprof.report.text.summary_markdown import as_code, summary_markdown
from dtprof.report.text.summary_text import summary_text
from tests.report.example_summaries import MS, STEP_NS, empty_summary, summary_of


def with_parts(**parts_ms: int) -> Summary:
    """Return two ranks with these parts; compute takes what is left of 200 ms."""
    parts = {**dict.fromkeys(PARTS, 0), **{name: length * MS for name, length in parts_ms.items()}}
    parts["compute"] = STEP_NS - sum(parts.values())
    summary = summary_of(num_ranks=2)
    return replace(summary, ranks=tuple(replace(rank, partition_ns=parts) for rank in summary.ranks))


def said(summary: Summary) -> str:
    return write_headline(summary).sentence.replace("\u00a0", " ")


def test_waits_for_a_straggler_name_it() -> None:
    # waits: 60, 60, 10, 60 of 200 ms: 47.5 / 200 = 24 %; the 20 ms of transfer are not waits
    assert said(summary_of()) == (
        "Ranks spend 24 % of a step of 200 ms waiting for others; rank 2 is to blame in 86 % of the steps waited in."
    )


def test_waits_without_a_straggler_blame_nobody() -> None:
    assert said(with_parts(exposed_wait=60)) == (
        "Ranks spend 30 % of a step of 200 ms waiting for others; no rank holds the others up."
    )


def test_without_a_common_clock_nobody_is_cleared() -> None:
    summary = replace(with_parts(exposed_wait=60), clock_error_ns=None, hosts=("a", "b"), stragglers=None)
    assert said(summary) == ("Ranks spend 30 % of a step of 200 ms waiting for others; for which rank is not known.")


def test_transfer_names_the_operation_that_exposes_most() -> None:
    headline = write_headline(with_parts(exposed_transfer=50, exposed_wait=4))
    assert headline.sentence.endswith("moving data that no work hides; most of it is all_reduce over world.")
    assert headline.evidence == "collectives"


def test_wait_and_transfer_together_count_where_neither_stands_out() -> None:
    assert said(with_parts(exposed_transfer=18, exposed_wait=18)) == (
        "Ranks spend 18 % of a step of 200 ms blocked by communication: 9.0 % waiting for others, 9.0 % moving data; "
        "no rank holds the others up."
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("data", "waiting for data"),
        ("checkpoint", "writing checkpoints"),
        ("bubble", "in pipeline bubbles"),
        ("host", "in host work outside every known phase"),
        ("idle", "idle"),
    ],
)
def test_every_other_loss_has_its_sentence_and_the_advice_that_was_predicted(part: str, words: str) -> None:
    advice = Advice(
        fix=("rank=1",), change="rank 1 as fast as the others", step_ns=150e6, gain=0.25, interval=(0.2, 0.3),
        replay_error=0.013,
    )  # fmt: skip
    summary = replace(with_parts(**{part: 50}), advice=advice)
    assert said(summary) == f"Ranks spend 25 % of a step of 200 ms {words}."
    assert write_headline(summary).advice == (
        "Rank 1 as fast as the others: 25.0 % shorter steps (20.0 to 30.0 %), to 150 ms; replay error 1.3 %."
    )


@pytest.mark.parametrize(("part", "named"), [("host", True), ("data", True), ("bubble", False)])
def test_the_line_that_takes_the_time_is_named_where_the_program_itself_does(part: str, named: bool) -> None:
    line = HotLine(
        file="/a/train.py", line=7, function="tokenise", share=0.3, rank=0, inner_function="tokenise", does=None
    )
    summary = replace(with_parts(**{part: 50}), hot_lines=(line,))
    words = "train.py:7 in tokenise takes 30 % of the time of rank 0"
    assert (words in said(summary)) == named
    assert f"hot line {words}" in " ".join(summary_text(summary).split())
    assert f"- hot line: {as_code(words)}" in summary_markdown(summary)


def test_advice_that_abstains_says_why_and_none_is_made_up() -> None:
    summary = replace(with_parts(data=50), advice=Advice(reason="the replayed step is 7 % off the measured one"))
    assert write_headline(summary).advice == "No change is named: the replayed step is 7 % off the measured one."
    assert not write_headline(with_parts(data=50)).advice


def test_a_job_that_computes_is_healthy() -> None:
    headline = write_headline(with_parts(data=4, optimizer=10))
    assert headline.verdict == "good"
    assert headline.sentence.replace("\u00a0", " ") == (
        "Ranks spend 98 % of a step of 200 ms computing (forward, backward, optimizer); "
        "nothing else takes more than 2.0 %."
    )


def test_a_rank_that_was_killed_comes_before_where_the_time_goes() -> None:
    summary = summary_of(num_ranks=3)
    killed = replace(summary.ranks[1], ended=RankEnd(EndState.KILLED, signal.SIGKILL))
    left = replace(summary.ranks[2], ended=RankEnd(EndState.EXITED, 1))
    headline = write_headline(replace(summary, ranks=(summary.ranks[0], killed, left)))
    assert headline.verdict == "bad"
    assert headline.sentence == "The job did not end well: rank 1 was killed by SIGKILL, rank 2 exited 1."
    assert headline.command == "dtprof diagnose dtprof-runs/20261121-101500-train"


def test_who_was_stopped_comes_after_who_failed() -> None:
    summary = summary_of(num_ranks=4)
    numbers = (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM)
    ended = (RankEnd(EndState.KILLED, number) for number in numbers)
    ranks = tuple(replace(rank, ended=end) for rank, end in zip(summary.ranks, ended, strict=True))
    assert said(replace(summary, ranks=ranks)) == (
        "The job did not end well: rank 1 was killed by SIGKILL, ranks 0, 2, 3 stopped by SIGTERM."
    )


def test_a_run_without_ranks_says_that_and_not_what_follows_from_it() -> None:
    caveats = (Caveat("run", "no rank left a log"), Caveat("steps", "no rank ended a step"))
    summary = replace(empty_summary(), ranks=(), world_size=0, cannot_tell=caveats)
    assert said(summary) == "Cannot tell where the time goes: no rank left a log."


def test_missing_ranks_are_named_and_counted() -> None:
    summary = replace(summary_of(num_ranks=2), missing_ranks=tuple(range(2, 10)))
    assert said(summary) == "The run is not whole: ranks 2, 3, 4, 5 and 4 more left no records."


def test_many_failed_ranks_do_not_fill_the_headline() -> None:
    summary = summary_of(num_ranks=64)
    failed = tuple(replace(rank, ended=RankEnd(EndState.EXITED, 1)) for rank in summary.ranks)
    assert said(replace(summary, ranks=failed)).endswith("rank 3 exited 1, 60 more ranks failed.")


def test_cannot_tell_says_why_and_prefers_what_is_said_of_steps() -> None:
    summary = replace(
        empty_summary(), cannot_tell=(Caveat("pipeline", "not recorded"), Caveat("steps", "none ended on rank 0"))
    )
    headline = write_headline(summary)
    assert headline.verdict == "unknown"
    assert headline.sentence == "Cannot tell where the time goes: none ended on rank 0."
    assert said(replace(summary, cannot_tell=())) == (
        "Cannot tell where the time goes: no step could be split into its parts."
    )


def test_a_running_job_is_not_a_failed_one() -> None:
    summary = summary_of(num_ranks=1)
    running = replace(summary, ranks=(replace(summary.ranks[0], ended=RankEnd(EndState.RUNNING)),))
    assert write_headline(running).verdict != "bad"


def test_the_command_is_safe_to_paste() -> None:
    summary = replace(empty_summary(), run="runs/my run; rm -rf x")
    assert write_headline(summary).command == "dtprof diagnose 'runs/my run; rm -rf x'"


def test_mean_parts_sum_to_one_and_weigh_ranks_by_their_steps() -> None:
    shares = summary_of().part_shares
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["exposed_wait"] == pytest.approx((60 * 3 + 10) / 800)
    assert empty_summary().part_shares is None
