"""Ranks that are surveyed in one go come as each does alone, whatever its records and those of its neighbours are."""

import random
from dataclasses import replace

import numpy as np
import pytest

from dtprof.analysis.map_reduce.placed_ranks import place_ranks
from dtprof.analysis.map_reduce.rank_facts import survey_batch
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.rank_batches import MAX_AXIS_NS, RankBatch, batch_in_turn, batch_ranks, lay_out
from dtprof.records import events
from dtprof.records.tables import Pipeline, RankTables
from tests.builders import RankBuilder

NUM_RANKS = 5
NAMES = (events.FORWARD, events.BACKWARD, events.OPTIMIZER, events.DATA, events.PP_STEP, *events.PIPELINE_FORWARD)


def odd_rank(rank: int, chance: random.Random) -> RankTables:
    """Make a rank in which anything may be: few or no records, ids of its own, no order, impossible times."""
    builder = RankBuilder(rank, world_size=NUM_RANKS, dropped_events=chance.choice((0, 0, 0, 7)))
    pair = builder.group("pair", (rank, (rank + 1) % NUM_RANKS))
    builder.pipelines = {1: Pipeline(schedule="Schedule1F1B", num_stages=2, stages=(0,), num_microbatches=2)}
    names = chance.sample((*NAMES, events.PP_BACKWARD), chance.randrange(len(NAMES) + 1))
    for name in names:
        builder.span(name, 0, 1, microbatch=1)  # so that ids differ between ranks
    for step in range(chance.randrange(4)):
        for _ in range(chance.randrange(12)):
            at = 1_000 * step + chance.randrange(1_000)
            kind, end = chance.randrange(4), at + chance.randrange(60)
            if kind == 0 and names:
                builder.span(chance.choice(names), at, chance.choice((end, None)), stage=0, microbatch=1)
            elif kind == 1:
                builder.op("all_reduce", at, end, group=chance.choice((0, pair)), seq=chance.randrange(9))
            elif kind == 2:
                builder.op(
                    chance.choice(("send", "recv")), at, end, peer=chance.randrange(-1, 3), tag=chance.randrange(2)
                )
            else:
                builder.op("broadcast", at, end, group=pair, peer=chance.randrange(2))
        for name in (events.PP_STEP, events.PP_FORWARD, events.BACKWARD, events.OPTIMIZER):
            if chance.random() < 0.8:
                begin = 1_000 * step + chance.randrange(900)
                builder.span(name, begin, begin + chance.randrange(100), stage=0, microbatch=1)
    tables = builder.tables()
    for table, column in ((tables.operations, "issued_ns"), (tables.spans, "begin_ns")):
        if len(table) and chance.random() < 0.2:
            table[column][chance.randrange(len(table))] = -5
    return tables


def shown(batch: RankBatch) -> list[str]:
    """Return all that is found of each rank, in words."""
    surveys = survey_batch(batch, several_clocks=True)
    instances = OperationInstances()
    for seen in surveys:
        instances.add(seen.instances)
    steps = {seen.facts.rank: seen.steps for seen in surveys}
    with np.printoptions(threshold=1 << 30):
        return [
            repr((seen, placed)) for seen, placed in zip(surveys, place_ranks(batch, steps, instances), strict=True)
        ]


@pytest.mark.parametrize("seed", range(100))
def test_ranks_surveyed_in_one_go_come_as_each_alone(seed: int) -> None:
    chance = random.Random(seed)
    ranks = [odd_rank(rank, chance) for rank in range(NUM_RANKS)]
    alone = [one for tables in ranks for one in shown(batch_ranks([tables]))]
    assert shown(batch_ranks(ranks)) == alone


def test_ranks_whose_times_are_too_far_apart_for_one_axis_come_as_each_alone() -> None:
    ranks = []
    for rank in range(3):
        builder = RankBuilder(rank, world_size=3)
        builder.pipelines = {1: Pipeline(schedule="ScheduleGPipe", num_stages=1, stages=(0,), num_microbatches=1)}
        for begin in (0, 100, MAX_AXIS_NS // 2):
            builder.span(events.PP_STEP, begin, begin + 50, microbatch=1)
            builder.span(events.PP_FORWARD, begin, begin + 30 + rank, stage=0, microbatch=0)
            builder.span(events.BACKWARD, begin + 40, begin + 45)
            builder.span(events.OPTIMIZER, begin + 60, begin + 70)
        ranks.append(builder.tables())
    alone = [one for tables in ranks for one in shown(batch_ranks([tables]))]
    assert shown(batch_ranks(ranks)) == alone
    pipelines = [seen.pipeline for seen in survey_batch(batch_ranks(ranks))]
    assert [pipeline.busy.tolist() for pipeline in pipelines if pipeline is not None] == [[30, 30], [31, 31], [32, 32]]


def test_batches_hold_as_many_rows_as_are_worth_it_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtprof.job.rank_batches.MAX_ROWS", 5)
    ranks = []
    for rank, rows in enumerate((3, 2, 1, 9, 0, 0)):
        builder = RankBuilder(rank, world_size=6)
        for i in range(rows):
            builder.op("all_reduce", 10 * i, 10 * i + 5)
        ranks.append(builder.tables())
    found = [[table.rank for table in batch.tables] for batch in batch_in_turn(ranks)]
    assert found == [[0, 1], [2], [3], [4, 5]]


def test_stretches_of_an_axis_follow_one_another() -> None:
    # Rank 0 takes 0 to 50, rank 1 51 to 91: its time 120 is moved to 51.
    shifts = lay_out([(100, 150), (120, 160)])
    assert shifts is not None
    assert shifts.tolist() == [-100, -69]
    alone = lay_out([(7, 9)])
    assert alone is not None
    assert alone.tolist() == [0]
    assert lay_out([(0, MAX_AXIS_NS), (0, 5)]) is None


def test_a_rank_keeps_its_tables_where_all_of_its_records_can_be() -> None:
    tables = odd_rank(0, random.Random(3))
    batch = batch_ranks([replace(tables, operations=tables.operations[:0], spans=tables.spans[:0])])
    assert len(batch.operations.of(0)) == len(batch.spans.of(0)) == 0
    assert survey_batch(batch)[0].pipeline is None
