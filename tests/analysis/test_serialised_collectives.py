"""Collectives waited for one by one although nothing is computed between them."""

import pytest

from dtprof.analysis.results import SerialisedCollectives
from dtprof.analysis.run_summary import summarise
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000


def training(
    *,
    gap: int = 0,
    ops: tuple[str, ...] = ("all_reduce",) * 3,
    dtype: str = "float32",
    reduce_op: str | None = None,
    is_async: bool = False,
    num_groups: int = 1,
) -> MemoryRun:
    """Return two ranks of 6 steps of 100 ms, each with operations of 10 ms one after the other, `gap` between them."""
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        groups = [rank.group(f"g{i}", (0, 1), "mesh_dp") for i in range(num_groups)]
        for step in range(6):
            t = 100 * MS * step
            rank.span("backward", t, t + 40 * MS)
            for i, op in enumerate(ops):
                begin = t + 41 * MS + i * (10 * MS + gap)
                if is_async:  # all issued at once, waited for together
                    begin, done = t + 41 * MS + i, t + 51 * MS + 10 * MS * i
                    waits = (max(begin, done - 10 * MS), done)
                    rank.op(op, begin, done, waits=waits, is_async=True, group=groups[0], nbytes=1 << 20)
                else:
                    group = groups[i % num_groups]
                    rank.op(op, begin, begin + 10 * MS, group=group, nbytes=1 << 20, dtype=dtype, reduce_op=reduce_op)
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
    return MemoryRun(ranks)


def found(run: MemoryRun) -> tuple[SerialisedCollectives, ...]:
    return summarise(run).serialised


@pytest.mark.parametrize("gap", [0, 100_000])
def test_neighbours_could_run_side_by_side_and_gain_all_but_the_longest(gap: int) -> None:
    # 3 of 10 ms in each step: 30 ms, of which 10 remain at best.
    (row,) = found(training(gap=gap))
    assert (row.axis, row.op, row.groups) == ("dp", "all_reduce", 1)
    assert (row.rows_per_step, row.count_per_step, row.bytes) == (1, 3, 1 << 20)
    assert (row.exposed_ns_per_step, row.gain_ns_per_step) == (30 * MS, 20 * MS)


def test_reductions_of_integers_are_no_sizes_of_what_follows() -> None:
    assert found(training(dtype="int64", reduce_op="sum"))


def test_text_and_json_tell_of_them() -> None:
    summary = summarise(training())
    assert "3 all_reduce of 1.00 MiB a step over dp run one after another: a step takes up to 20.0 ms less" in " ".join(
        summary_text(summary).split()
    )
    assert summary_json(summary)["serialised"][0]["gain_ns_per_step"] == 20 * MS


def two_phases() -> MemoryRun:
    """Activations are exchanged at the end of the forward pass, their gradients soon in the backward pass."""
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        group = rank.group("g", (0, 1), "mesh_dp")
        for step in range(6):
            t = 100 * MS * step
            for phase, begin in (("forward", t + 1 * MS), ("backward", t + 32 * MS)):
                rank.span(phase, begin, begin + 30 * MS)
            for begin in (t + 10 * MS, t + 33 * MS):
                rank.op("all_to_all", begin, begin + 22 * MS, group=group, dtype="float32")
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
    return MemoryRun(ranks)


def test_a_row_in_some_steps_alone_is_said_to_be() -> None:
    """2 of 10 ms in 4 of the 5 measured steps."""
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        group = rank.group("g", (0, 1), "mesh_dp")
        for step in range(6):
            t = 100 * MS * step
            rank.span("backward", t, t + 40 * MS)
            for begin in (41, 51) if step != 3 else (41,):
                rank.op("all_reduce", t + begin * MS, t + (begin + 10) * MS, group=group, nbytes=1 << 20)
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
    text = " ".join(summary_text(summarise(MemoryRun(ranks))).split())
    assert "serialised 2 all_reduce of 1.00 MiB in 80.0 % of the steps over dp run one after another" in text


@pytest.mark.parametrize(
    "run",
    [
        two_phases(),
        training(gap=2 * MS),  # something is computed between them
        training(is_async=True),  # they are under way together
        training(ops=("reduce_scatter", "all_gather")),  # the second may take what the first gives
        training(num_groups=3),  # as above: over one group, then over another
        training(ops=("all_reduce",)),
        training(ops=("all_to_all",) * 2, dtype="int64"),  # how many values each rank sends, then these
    ],
)
def test_nothing_is_said_of_those_that_may_depend_on_what_is_between(run: MemoryRun) -> None:
    assert found(run) == ()


def test_a_row_in_one_step_of_many_makes_no_step_shorter() -> None:
    """Metrics are summed up after an epoch: of 30 ms in one of 6 steps 24 could be spared, 4 ms of each."""
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        group = rank.group("g", (0, 1), "mesh_dp")
        for step in range(6):
            rank.span("backward", 100 * MS * step, (100 * step + 40) * MS)
            rank.span("optimizer", (100 * step + 90) * MS, (100 * step + 95) * MS)
        for i in range(5):
            rank.op("all_gather", (351 + 6 * i) * MS, (357 + 6 * i) * MS, group=group)
    assert found(MemoryRun(ranks)) == ()
