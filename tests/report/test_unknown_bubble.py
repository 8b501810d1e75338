"""What the report says of a pipeline whose schedule is not recorded, and what can be done about operations in a row."""

import pytest

from dtprof.analysis.pipeline.bubbles import has_unknown_bubble
from dtprof.analysis.run_summary import summarise
from dtprof.report.figures.pipeline_figure import NO_PIPELINE, UNKNOWN_SCHEDULE, explain_no_pipeline
from dtprof.report.pages.page_key_figures import _bubble
from dtprof.report.text.summary_text import _format_rate, _issued_together
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000


@pytest.mark.parametrize(("by_hand", "value"), [(True, "not known"), (False, "none")])
def test_unknown_bubble_is_no_absent_pipeline(by_hand: bool, value: str) -> None:
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank, builder in enumerate(ranks):
        for step in range(4):
            begin = 100 * MS * step
            builder.span("backward", begin + 10 * MS, begin + 60 * MS)
            if by_hand:
                builder.op("recv" if rank else "send", begin + 61 * MS, begin + 62 * MS, peer=1 - rank)
            builder.span("optimizer", begin + 80 * MS, begin + 90 * MS)
    summary = summarise(MemoryRun(ranks))
    assert has_unknown_bubble(summary) is by_hand
    assert _bubble(summary).value == value
    assert explain_no_pipeline(summary) is (UNKNOWN_SCHEDULE if by_hand else NO_PIPELINE)


def test_advice_is_for_who_issues_the_operations() -> None:
    assert _issued_together("all_gather") == "issued together (async_op, coalesced)"
    assert _issued_together("fsdp") == "fsdp issued them together"


@pytest.mark.parametrize(("count", "shown"), [(11.6, "12"), (1.0, "1"), (0.25, "0.25"), (0.1111, "0.11")])
def test_operations_of_few_steps_are_not_none_a_step(count: float, shown: str) -> None:
    assert _format_rate(count) == shown
