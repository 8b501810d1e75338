"""Operations summed by axis, where the axis is that of their group, and where only their label tells it."""

from dtprof.analysis.communication.axis_collectives import collectives_by_axis, name_operations, sum_by_axis
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.sites import Label
from tests.builders import MemoryRun, RankBuilder


def two_pipelines(*, labelled: bool) -> Summary:
    """Return ranks 0 and 2, and 1 and 3, that exchange activations over the default group, and gradients over pp.

    Each step has one of each, and an all_reduce of all ranks.
    """
    ranks = [RankBuilder(number, world_size=4) for number in range(4)]
    for number, rank in enumerate(ranks):
        stages = rank.group(f"pipeline {number % 2}", (number % 2, number % 2 + 2), "mesh_pp")
        site = rank.site("send", label=Label(api="pp", text="pp activations") if labelled else None)
        first = number < 2
        peer = (number + 2) % 4
        for step in range(6):
            at = step * 1000
            rank.op("send" if first else "recv", at + 10, at + 20, peer=peer, site=site, nbytes=8)
            rank.op("recv" if first else "send", at + 30, at + 40, peer=int(first), site=site, nbytes=8, group=stages)
            rank.op("all_reduce", at + 50, at + 60, nbytes=8)
            rank.span("backward", at + 70, at + 80)
            rank.span("optimizer", at + 90, at + 95)
    return summarise(MemoryRun(ranks))


def test_messages_over_the_default_group_belong_to_the_axis_that_their_label_names() -> None:
    summary = two_pipelines(labelled=True)
    rows = {(row.axis, row.op): row.groups for row in collectives_by_axis(summary)}
    assert rows == {("pp", "send"): 2, ("pp", "recv"): 2, ("default_pg", "all_reduce"): 1}
    assert {(row.axis, row.groups) for row in sum_by_axis(summary)} == {("pp", 2), ("default_pg", 1)}
    assert {(row.group, row.op): row.axis for row in summary.collectives if row.group == "0"} == {
        ("0", "send"): "pp", ("0", "recv"): "pp", ("0", "all_reduce"): "default_pg",
    }  # fmt: skip
    named = name_operations(summary, {"0": "world", "pipeline 0": "pp (0)", "pipeline 1": "pp (1)"})
    assert named["0", "send"] == "pp over world"
    assert (named["0", "all_reduce"], named["pipeline 0", "send"]) == ("world", "pp (0)")


def test_without_a_label_messages_belong_to_their_group() -> None:
    summary = two_pipelines(labelled=False)
    rows = {(row.axis, row.op) for row in collectives_by_axis(summary)}
    assert {("default_pg", "send"), ("default_pg", "recv"), ("pp", "send"), ("pp", "recv")} <= rows
