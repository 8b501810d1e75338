"""What a running job tells a monitoring system equals what dtprof says of the same records afterwards."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.map_reduce.placed_ranks import RankTiming, read_placed, time_batch
from dtprof.analysis.map_reduce.rank_facts import survey_batch
from dtprof.analysis.steps.step_boundaries import choose_steps, find_steps_of
from dtprof.intervals import NONE
from dtprof.job.clock_errors import ONE_CLOCK
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.rank_batches import batch_ranks
from dtprof.monitor.prometheus.node_tally import NodeTally, group_label
from dtprof.records.reader import Run, open_run
from dtprof.records.run_follower import RunFollower
from dtprof.records.tables import UNKNOWN_NS, RankTables
from tests import synthetic
from tests.monitor.growing import grow

MS = 1_000_000
JOB = synthetic.Job(dp=2, tp=2, pp=2, steps=12, microbatches=3, jitter=0.1, slow={3: 1.3}, overlapped=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "job"
    synthetic.generate(folder, JOB)
    return folder


def tally_of(run: Path, looks: int) -> NodeTally:
    tally, follower = NodeTally(), RunFollower(run)
    for _ in grow(run, looks):
        tally.take(follower.poll())
    follower.close()
    return tally


def by_label(tally: NodeTally, name: str) -> dict[tuple[str, str], int]:
    table = tally.sums[name]
    return {
        (group, op): int(table[i, j])
        for i, group in enumerate(tally.groups.values)
        for j, op in enumerate(tally.ops.values)
        if table[i, j]
    }


def timed(run: Run) -> Iterator[tuple[RankTables, RankTiming]]:
    """Yield every rank with what the summary takes its figures from."""
    everyone = list(run.load_all())
    instances = OperationInstances()
    surveys = survey_batch(batch_ranks(everyone))
    for seen in surveys:
        instances.add(seen.instances)
    for tables, seen in zip(everyone, surveys, strict=True):
        (batch,) = read_placed(
            [tables],
            steps={tables.rank: seen.steps},
            measured=choose_steps([seen.steps]),
            instances=instances,
            pipeline_windows={tables.rank: NONE},
        )
        (rank,) = batch.timed(time_batch(batch, instances, ONE_CLOCK))
        yield tables, rank


@pytest.mark.parametrize("looks", [1, 7, 40])
def test_figures_equal_those_of_the_whole_run(run: Path, looks: int) -> None:
    tally = tally_of(run, looks)
    expected = {
        name: Counter[tuple[str, str]]() for name in ("count", "nbytes", "duration_ns", "blocked_ns", "wait_ns")
    }
    phases = Counter[str]()
    for tables, timing in timed(open_run(run)):
        own = tally.ranks[tables.rank]
        steps = find_steps_of(tables)
        counts, total_ns = own.steps.durations()
        assert own.steps.num_ended == steps.count == JOB.steps
        assert (sum(counts), total_ns) == (len(steps.numbers), int(np.diff(steps.windows).sum()))
        assert own.num_events == tables.num_events
        rows, blocked, times = timing.operations, timing.blocked, timing.timing
        exposed = np.where(blocked.known & blocked.counts, times.exposed_wait + times.exposed_transfer, 0)
        assert own.blocked_ns == exposed.sum()
        collective = np.zeros(len(rows), np.bool_)
        for channel, own_rows in zip(timing.matched.channels, timing.matched.rows, strict=True):
            collective[own_rows] = not channel.is_p2p and channel.num_members > 1
        waited = np.where(collective & (times.wait != UNKNOWN_NS), times.wait, 0)
        assert own.wait_ns == waited.sum()
        for i, row in enumerate(rows):
            key = group_label(tables.groups[row["group"]]), tables.ops[row["op"]]
            expected["count"][key] += 1
            expected["nbytes"][key] += int(row["nbytes"])
            expected["duration_ns"][key] += int(row["done_ns"] - row["issued_ns"])
            expected["blocked_ns"][key] += int(exposed[i])
            expected["wait_ns"][key] += int(waited[i])
        for span in tables.spans:
            phases[tables.ops[span["op"]]] += int(span["end_ns"] - span["begin_ns"])
    for name, sums in expected.items():
        assert by_label(tally, name) == {key: value for key, value in sums.items() if value}, name
    assert {key[0] for key in expected["count"]} >= {"dp", "tp", "pp"}
    assert sum(own.waited_for_ns for own in tally.ranks.values()) == sum(own.wait_ns for own in tally.ranks.values())
    assert dict(zip(tally.phases.values, tally.phase_ns.tolist(), strict=False)) == {
        k: v for k, v in phases.items() if v
    }
    assert not tally.sums["open"].any()
