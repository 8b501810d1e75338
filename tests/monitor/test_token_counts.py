"""Tokens and samples that nodes tell of: they add up to those of the job, however its ranks lie on nodes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.interchange.metric_families import exposition
from dtprof.monitor.prometheus.job_metrics import list_metrics
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.monitor.prometheus.node_tally import NodeTally
from tests.builders import RankBuilder
from tests.monitor.test_job_metrics import growth

MS = 1_000_000
STEP = 100 * MS
STEPS = 6
Groups = Sequence[tuple[str, Sequence[int]]]


def rank_fed(rank: int, tokens: Sequence[int], groups: Groups = (), *, attempt: int = 0) -> RankBuilder:
    """Return a rank that is fed so many tokens in each step, 64 a sample."""
    builder = RankBuilder(rank, world_size=4, attempt=attempt)
    for description, members in groups:
        if rank in members:
            builder.group(f"{description}{members[0]}", members, description)
    before = 0
    for step, value in enumerate(tokens):
        begin = step * STEP
        builder.span("backward", begin + 10 * MS, begin + 60 * MS)
        if value != before:
            builder.sample("step_tokens", begin + 70 * MS, value)
            builder.sample("step_samples", begin + 70 * MS, value // 64)
        before = value
        builder.span("optimizer", begin + 80 * MS, begin + 85 * MS)
        builder.span("optimizer", begin + 85 * MS, begin + 90 * MS)
    return builder


def consumed(ranks: Sequence[RankBuilder]) -> tuple[int, int]:
    """Return the tokens and samples that count on a node of these ranks."""
    tally = NodeTally()
    tally.take({builder.rank: growth(builder.tables()) for builder in ranks})
    tokens, samples = tally.consumed().tolist()
    return tokens, samples


TP: Groups = [("mesh_tp", (0, 1)), ("mesh_tp", (2, 3))]
PP: Groups = [("mesh_pp", (0, 2)), ("mesh_pp", (1, 3))]
CP: Groups = [("mesh_cp", (0, 1)), ("mesh_cp", (2, 3))]


@pytest.mark.parametrize(
    ("groups", "tokens", "samples"),
    [([], 4, 4), (TP, 2, 2), ([*TP, *PP], 1, 1), (CP, 4, 2), ([*TP, *CP], 2, 2)],
    ids=["no groups", "tp", "tp and pp", "cp", "tp and cp alike"],
)
@pytest.mark.parametrize("nodes", [["0123"], ["01", "23"], ["03", "12"], ["0", "1", "2", "3"]], ids="/".join)
def test_nodes_add_up_to_the_job(nodes: list[str], groups: Groups, tokens: int, samples: int) -> None:
    told = [consumed([rank_fed(int(rank), [640] * STEPS, groups) for rank in node]) for node in nodes]
    # Each group of ranks that share tokens was given 640 in 10 samples, in each of 6 steps.
    assert sum(own[0] for own in told) == tokens * STEPS * 640
    assert sum(own[1] for own in told) == samples * STEPS * 10


def test_of_ranks_that_share_tokens_the_one_that_was_given_most_counts() -> None:
    first, last = rank_fed(0, [640] * STEPS, PP), rank_fed(2, [0] * STEPS, PP)  # the last stage gets activations
    assert consumed([first, last]) == consumed([first]) == (STEPS * 640, STEPS * 10)
    assert consumed([last]) == (0, 0)


def test_each_step_counts_with_what_it_was_fed_however_often_one_looks() -> None:
    fed = (64, 128, 192, 192, 640, 1280)
    tables = rank_fed(0, fed).tables()
    tally, told = NodeTally(), []
    for begin in range(0, STEPS * STEP, 5 * MS):
        times = (tables.first_ns + begin, tables.first_ns + begin + 5 * MS)
        seen = {
            name: rows[(rows[column] > times[0]) & (rows[column] <= times[1])]
            for name, rows, column in (("spans", tables.spans, "end_ns"), ("samples", tables.samples, "t_ns"))
        }
        tally.take({0: growth(replace(tables, **seen))})
        told.append(int(tally.consumed()[0]))
    assert sorted(set(told)) == [0, *(sum(fed[: step + 1]) for step in range(STEPS))]
    assert told == sorted(told)


def test_a_restart_goes_on_counting_and_an_unknown_count_is_not_known_as_zero() -> None:
    tally = NodeTally()
    for attempt in range(2):
        tally.take({0: growth(rank_fed(0, [640] * STEPS, attempt=attempt).tables())})
    text = exposition(list_metrics(tally, NodeState(run="run", host="host"), shown=(0,), cpu_s=0.0)).decode()
    assert f"dtprof_tokens_total {float(2 * STEPS * 640)}\n" in text
    tally = NodeTally()
    tally.take({0: growth(rank_fed(0, [0] * STEPS).tables())})
    text = exposition(list_metrics(tally, NodeState(run="run", host="host"), shown=(0,), cpu_s=0.0)).decode()
    assert "dtprof_tokens_total" not in text
    assert "dtprof_samples_total" not in text
