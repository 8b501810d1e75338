"""The cards show the figures of the summary, and say so where one is not known."""

from dataclasses import replace

from dtprof.analysis.results import GroupResult, StragglerResult, Summary
from dtprof.report.pages.page_key_figures import key_figures
from tests.report.example_summaries import MS, empty_summary, summary_of

NOT_KNOWN = "not known"


def cards(summary: Summary) -> dict[str, tuple[str, str]]:
    plain = str.maketrans({"\u00a0": " "})
    return {
        key: (card.value.translate(plain), card.beside.translate(plain)) for key, card in key_figures(summary).items()
    }


def test_cards_of_a_whole_run() -> None:
    shown = cards(summary_of())
    assert shown["step_time"] == ("200 ms", "p10\u2013p90 198 ms \u2013 209 ms; steps 3\u201320 of 20")
    # waits 47.5, transfer 20 of 200 ms
    assert shown["exposed_communication"] == ("34 %", "of the step: 24 % wait, 10 % transfer")
    assert shown["peak_memory"] == ("515 MiB", "rank 3; least 512 MiB, rank 0")
    assert shown["slowdown"] == ("1.33\u00d7", "rank 2, costs others 150 ms a step")
    assert shown["clock_error"] == ("\u00b1 0 ns", "one host, one clock")
    assert shown["overhead"] == ("<0.1 %", "of the step; 850 ns an event, native hook")
    assert shown["events"] == ("4,936", "4 ranks of 4; none dropped, none missing")


def test_overlap_weighs_operations_by_count_and_ranks() -> None:
    summary = summary_of(num_ranks=4)
    first = replace(summary.collectives[0], group="0", count=1, duration_ns=10 * MS, exposed_ns=10 * MS)
    second = replace(summary.collectives[0], group="1", count=4, duration_ns=10 * MS, exposed_ns=0)
    groups = (
        GroupResult(name="0", description="", ranks=(0, 1, 2, 3), axis=None),
        GroupResult(name="1", description="", ranks=(0, 1), axis=None),
    )
    # in flight: 1 x 4 x 10 + 4 x 2 x 10 = 120 ms, exposed 40 ms
    assert cards(replace(summary, collectives=(first, second), groups=groups))["overlap"][0] == "67 %"


def test_overlap_is_never_negative() -> None:
    summary = summary_of()
    blocked = replace(summary.collectives[0], duration_ns=10 * MS, exposed_ns=12 * MS)
    assert cards(replace(summary, collectives=(blocked,)))["overlap"][0] == "0 %"


def test_what_is_not_known_is_never_zero() -> None:
    shown = cards(empty_summary())
    for key in ("step_time", "exposed_communication", "overlap", "peak_memory", "clock_error", "overhead"):
        assert shown[key][0] == NOT_KNOWN, key
        assert shown[key][1], key


def test_no_straggler_is_none_only_where_waits_were_measured() -> None:
    assert cards(replace(summary_of(), stragglers=()))["slowdown"][0] == "none"
    apart = replace(summary_of(), stragglers=None, clock_error_ns=None, hosts=("a", "b"))
    assert cards(apart)["slowdown"][0] == NOT_KNOWN
    assert cards(summary_of(num_ranks=1))["slowdown"] == ("none", "one rank waits for nobody")
    unmeasured = StragglerResult(rank=1, last_share=0.5, slowdown=None, blame_ns_per_step=None)
    assert cards(replace(summary_of(), stragglers=(unmeasured,)))["slowdown"] == (NOT_KNOWN, "rank 1")


def test_losses_of_records_are_named() -> None:
    summary = replace(summary_of(num_ranks=3), world_size=4, missing_ranks=(3,), dropped_events=12_000)
    assert cards(summary)["events"][1] == "3 ranks of 4; 12,000 dropped, 1 rank missing"


def test_several_stragglers_have_one_slowdown_or_none_as_in_the_metrics() -> None:
    first, second = (
        StragglerResult(rank=rank, last_share=0.5, slowdown=slowdown, blame_ns_per_step=100)
        for rank, slowdown in ((1, 1.2), (3, 1.4))
    )
    apart = replace(summary_of(), stragglers=(first, second))
    assert apart.straggler_slowdown is None
    assert cards(apart)["slowdown"] == (NOT_KNOWN, "ranks 1, 3 together; rank 1 alone 1.20\u00d7")
    together = replace(apart, stragglers=(first, replace(second, slowdown_together=1.5)))
    assert cards(together)["slowdown"] == ("1.50\u00d7", "ranks 1, 3 together")
