"""At most so much of its steps a rank was blocked, worked out by hand."""

from pathlib import Path

import pytest

from dtprof.diagnosis.sources import recorded_ranks
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import open_run
from tests.builders import RankBuilder, write_run
from tests.synthetic.job import Job
from tests.synthetic.writing import generate

MS = 1_000_000


def share(path: Path, rank: int = 0) -> float | None:
    """Return what is read of a rank."""
    (found,) = recorded_ranks.read_ranks(open_run(path), [rank], THIS_PROCESS)
    return found.evidence.blocked_share


def steps_of(own: RankBuilder, *, counted: bool = True) -> RankBuilder:
    """Let a rank take steps of 100 ms, in each of which two blocking calls take 10 and 20 ms."""
    for step in range(1, 8):
        t = step * 100 * MS
        own.op("all_reduce", t, t + 10 * MS, step=step if counted else 0, nbytes=8)
        own.op("all_reduce", t + 50 * MS, t + 70 * MS, step=step if counted else 0, nbytes=8)
    return own


def test_calls_of_30_ms_take_0_3_of_steps_of_100_ms(tmp_path: Path) -> None:
    assert share(write_run(tmp_path / "run", [steps_of(RankBuilder(0, world_size=1))])) == pytest.approx(0.3)


def test_without_steps_nothing_is_known(tmp_path: Path) -> None:
    assert share(write_run(tmp_path / "run", [steps_of(RankBuilder(0, world_size=1), counted=False)])) is None


def test_of_a_slow_rank_and_its_victims_the_victims_are_blocked(tmp_path: Path) -> None:
    generate(tmp_path / "run", Job(dp=4, steps=12, slow={1: 1.5}))
    shares = [share(tmp_path / "run", rank) for rank in range(4)]
    assert all(own is not None and (own > 0.15) == (rank != 1) for rank, own in enumerate(shares)), shares
