"""Messages by which ranks exchange parameters, beside those of which stages of a pipeline may be made."""

import dataclasses

import pytest

from dtprof.analysis.pipeline.bubbles import may_be_stage
from dtprof.analysis.steps.parameter_exchanges import find_parameter_messages
from dtprof.analysis.steps.step_boundaries import find_steps
from dtprof.analysis.steps.throughput import find_consumption
from dtprof.job.rank_batches import batch_ranks
from dtprof.records.tables import OptimizerAge
from tests.builders import RankBuilder

MS = 1_000_000
ELEMENTS = 100


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        # Milliseconds in the step, values, type, peer: the passes last from 20 to 60 ms.
        ([(5, 100, "float32", 1), (10, 100, "float32", 2)], [True, True]),
        ([(5, 60, "bfloat16", 1), (10, 40, "bfloat16", 1)], [True, True]),  # parameter by parameter
        ([(70, 200, "float32", 1)], [True]),  # with their momentum
        ([(40, 100, "float32", 1)], [False]),  # what the forward pass gives
        ([(5, 100, "float32", 1), (40, 100, "float32", 2)], [True, False]),
        ([(5, 100, "float32", 1), (70, 8, "int64", 1)], [False, False]),  # sequences, too
        ([(5, 90, "float32", 1)], [False]),
    ],
)
def test_messages_are_of_parameters_by_their_values_and_their_time(
    messages: list[tuple[int, int, str, int]], expected: list[bool]
) -> None:
    builder = RankBuilder(0, world_size=3)
    group = builder.group("0", (0, 1, 2), "default_pg")
    for step in range(3):
        begin = 100 * MS * step
        builder.span("forward", begin + 20 * MS, begin + 30 * MS)
        for at, values, dtype, peer in messages:
            size, time = {"int64": 8, "float32": 4, "bfloat16": 2}[dtype], begin + at * MS
            builder.op("send", time, time + MS, peer=peer, group=group, nbytes=size * values, dtype=dtype)
        builder.span("backward", begin + 50 * MS, begin + 60 * MS)
        builder.sample("step_tokens", begin + 75 * MS, 640)
        builder.span("optimizer", begin + 80 * MS, begin + 100 * MS)
    age = OptimizerAge(steps=0, parameters=2, elements=ELEMENTS)
    tables = dataclasses.replace(builder.tables(), optimizer_ages=(age,))
    (steps,) = find_steps(batch_ranks([tables]))
    found = find_parameter_messages(tables, tables.operations, steps)
    assert found.tolist() == [False] * len(expected) + 2 * expected  # the first step has no begin
    assert may_be_stage(tables, tables.operations, steps) == (not all(expected))
    consumption = find_consumption(tables, steps)
    assert consumption is not None
    assert bool(consumption.unclear) == (not all(expected))
