"""Pipelines that a program wrote itself: stages, microbatches and bubbles from messages and passes."""

import re
from collections.abc import Sequence

import pytest

from dtprof.analysis.pipeline.bubbles import INFERRED
from dtprof.analysis.pipeline.inferred_stages import name_schedule
from dtprof.analysis.pipeline.schedule_replay import BACKWARD, FORWARD
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from tests.builders import MemoryRun, RankBuilder

PERIOD, NUM_STEPS = 1000, 6
Action = tuple[str, int, int]
"""A pass with its begin and end, a collective, or a message: `<1` receives from rank 1, `>1` sends to it."""

# Two stages, two microbatches, forward 10, backward 20, messages free: each rank idles 30 of 90.
GPIPE: tuple[list[Action], ...] = (
    [
        *(("F", 0, 10), (">1", 10, 10), ("F", 10, 20), (">1", 20, 20)),
        *(("<1", 21, 50), ("B", 50, 70), ("<1", 70, 70), ("B", 70, 90)),
    ],
    [
        *(("<0", 0, 10), ("F", 10, 20), ("<0", 20, 20), ("F", 20, 30)),
        *(("B", 30, 50), (">0", 50, 50), ("B", 50, 70), (">0", 70, 70)),
    ],
)
# The same with one pass of each at a time on the second stage, which is 1F1B.
ONE_F_ONE_B: tuple[list[Action], ...] = (
    [
        *(("F", 0, 10), (">1", 10, 10), ("F", 10, 20), (">1", 20, 20)),
        *(("<1", 21, 40), ("B", 40, 60), ("<1", 61, 70), ("B", 70, 90)),
    ],
    [
        *(("<0", 0, 10), ("F", 10, 20), ("B", 20, 40), (">0", 40, 40)),
        *(("<0", 40, 40), ("F", 40, 50), ("B", 50, 70), (">0", 70, 70)),
    ],
)
NAMES = {"F": "forward", "B": "backward"}


def build(ranks: Sequence[Sequence[Action]], steps: int = NUM_STEPS) -> list[RankBuilder]:
    """Return ranks that repeat these actions in each step."""
    builders = []
    for number, actions in enumerate(ranks):
        rank = RankBuilder(number, world_size=len(ranks))
        for step in range(steps):
            at = step * PERIOD
            for what, begin, end in actions:
                if what in NAMES:
                    rank.span(NAMES[what], at + begin, at + end)
                elif what == "all_reduce":
                    rank.op(what, at + begin, at + end)
                else:
                    peer = int(what[1:])
                    rank.op("recv" if what[0] == "<" else "send", at + begin, at + end, peer=peer, nbytes=8)
            rank.span("optimizer", at + 210, at + 220)
        builders.append(rank)
    return builders


def summary_of(ranks: Sequence[Sequence[Action]]) -> Summary:
    return summarise(MemoryRun(build(ranks)))


@pytest.mark.parametrize(("ranks", "schedule"), [(GPIPE, "GPipe"), (ONE_F_ONE_B, "1F1B")])
def test_a_pipeline_by_hand_has_the_bubble_of_its_schedule(ranks: tuple[list[Action], ...], schedule: str) -> None:
    summary = summary_of(ranks)
    result = summary.pipeline
    assert result is not None
    assert result.inferred
    assert INFERRED in summary.cannot_tell
    assert (result.schedule, result.stages, result.ranks, result.microbatches) == (schedule, 2, 2, 2)
    assert result.bubble_fraction == pytest.approx(1 / 3)
    assert result.theory_fraction == pytest.approx(1 / 3)
    assert result.parts == pytest.approx({"schedule": 1 / 3, "imbalance": 0, "exposed_p2p": 0, "jitter": 0})
    assert [(one.rank, one.bubble_ns) for one in result.per_rank] == [(0, 30), (1, 30)]
    assert [(rank.partition_ns or {})["bubble"] for rank in summary.ranks] == [30, 30]
    assert [one.stage for one in result.per_stage] == [0, 1]


def test_the_loss_after_the_last_forward_pass_is_no_bubble() -> None:
    """The second stage computes its loss from 20 to 25, before its backward pass, which begins then."""
    first, last = ([*actions] for actions in ONE_F_ONE_B)
    last[1] = ("F", 10, 15)
    result = summary_of((first, last)).pipeline
    assert result is not None
    assert [(one.rank, one.bubble_ns) for one in result.per_rank] == [(0, 30), (1, 30)]
    # Where it takes part in a collective in between, it is.
    last[2:2] = [("all_reduce", 16, 19)]
    first[6:6] = [("all_reduce", 61, 62)]
    result = summary_of((first, last)).pipeline
    assert result is not None
    assert [(one.rank, one.bubble_ns) for one in result.per_rank] == [(0, 30), (1, 35)]


def test_two_replicas_by_hand_are_two_pipelines() -> None:
    """Ranks 0 and 1 are first stages, 2 and 3 last ones."""
    first, last = ONE_F_ONE_B
    ranks = [
        [(what.replace("1", str(other)) if what[0] in "<>" else what, *times) for what, *times in first]
        for other in (2, 3)
    ] + [
        [(what.replace("0", str(other)) if what[0] in "<>" else what, *times) for what, *times in last]
        for other in (0, 1)
    ]
    result = summary_of(ranks).pipeline  # type: ignore[arg-type]
    assert result is not None
    assert (result.ranks, result.bubble_fraction) == (2, pytest.approx(1 / 3))
    assert len(result.per_rank) == 4


RING: list[list[Action]] = [
    [(f"<{(rank + 2) % 3}", 0, 5), ("F", 10, 20), (f">{(rank + 1) % 3}", 20, 20), ("B", 30, 50)] for rank in range(3)
]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (RING, "messages do not join ranks to a chain of stages"),
        ([[(">1", 1, 2), ("F", 10, 20), ("B", 20, 40)], [("<0", 1, 2), ("F", 10, 20), ("B", 20, 40)]], "a chain"),
        ([[("<1", 1, 2), (">1", 3, 4), ("B", 20, 40)], [("<0", 1, 2), (">0", 3, 4), ("B", 20, 40)]], "one module"),
        ([[("F", 10, 20), ("<1", 12, 14), (">1", 15, 16), ("B", 20, 40)]] * 2, "exchange messages themselves"),
        ([[("<1", 1, 2), ("F", 10, 20), ("B", 20, 30), ("B", 30, 40)]] * 2, "1 forward and 2 backward passes"),
        ([[("<1", 1, 2), ("F", 10, 20), ("<1", 21, 22), ("B", 30, 40)]] * 2, "where several stages lie on each rank"),
        ([[("<1", 1, 2), ("<2", 3, 4), ("F", 10, 20), ("B", 30, 40)]] * 3, "ranks 1, 2, and what its backward"),
        ([[("F", 10, 20), ("F", 20, 30), ("<1", 31, 32), ("B", 40, 50), ("B", 50, 60), (">1", 70, 71)]] * 2, "without"),
    ],
)
def test_where_messages_and_passes_do_not_fit_the_bubble_is_not_known(ranks: list[list[Action]], reason: str) -> None:
    summary = summary_of(ranks)
    assert summary.pipeline is None
    why = " ".join(caveat for caveat in summary.cannot_tell if caveat.startswith("pipeline: "))
    assert "is not known" in why
    assert re.search(reason, why)
    assert [(rank.partition_ns or {})["bubble"] for rank in summary.ranks] == [None] * len(ranks)


def test_orders_that_no_known_schedule_has_are_of_their_own() -> None:
    f, b = FORWARD, BACKWARD
    assert name_schedule([[f, f, f, b, b, b], [f, f, f, b, b, b]], 3) == "GPipe"
    assert name_schedule([[f, f, b, f, b, b], [f, b, f, b, f, b]], 3) == "1F1B"
    assert name_schedule([[f, f, f, b, b, b], [f, b, f, b, f, b]], 3) == "of its own"
    assert name_schedule([[], []], 3) == "of its own"
