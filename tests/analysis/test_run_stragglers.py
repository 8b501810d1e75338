"""The search for stragglers alone finds what the summary of the run tells of them."""

from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.analysis.stragglers.run_stragglers import search_stragglers
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import open_run
from tests.builders import RankBuilder, write_run
from tests.synthetic import HostClock, Job, generate

JOBS = {
    "one of eight": Job(dp=4, tp=2, steps=12, jitter=0.03, slow={5: 1.8}),
    "a host of another clock": Job(
        dp=8, steps=12, jitter=0.03, slow={2: 1.6}, ranks_per_host=4, clocks={1: HostClock(offset_ns=3_000_000)}
    ),
    "a stage of a pipeline": Job(dp=2, pp=4, microbatches=8, steps=10, jitter=0.03, slow={3: 1.7}),
    "none": Job(dp=4, steps=12, jitter=0.03),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_search_for_stragglers_finds_those_of_the_summary(job: Job, tmp_path: Path) -> None:
    generate(tmp_path, job)
    run = open_run(tmp_path)
    summary, searched = summarise(run), search_stragglers(run, THIS_PROCESS)
    assert searched.found == summary.stragglers
    assert bool(searched.found) == bool(job.slow)
    first, last = summary.steps.used or (1, 0)
    assert searched.num_steps == last - first + 1
    assert searched.took_ns() == max(sum(series.duration_ns) for series in summary.step_series)
    for straggler in searched.found:
        (series,) = (one for one in summary.step_series if one.rank == straggler.rank)
        late = [ns for step, ns in zip(series.steps, series.duration_ns, strict=True) if step >= straggler.since_step]
        assert searched.late_ns(straggler) == sum(late)


def test_the_newest_operations_alone_tell_who_waited_for_whom(tmp_path: Path) -> None:
    generate(tmp_path, Job(dp=2, pp=4, microbatches=8, steps=60, layers=1, jitter=0.03, slow={3: 1.7}))
    run = open_run(tmp_path)
    newest = run.only_newest(run.count_events() // 8, of_each=64)
    ((whole,), (part,)) = (search_stragglers(one, THIS_PROCESS).found for one in (run, newest))
    assert part.rank == whole.rank == 3
    # Logs are cut at another message on each rank: counted from there, sends would meet receives of other microbatches.
    assert part.blame_ns_per_step == pytest.approx(whole.blame_ns_per_step, rel=0.05)


def test_a_run_without_steps_has_none(tmp_path: Path) -> None:
    ranks = [RankBuilder(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 100, 200)
    searched = search_stragglers(open_run(write_run(tmp_path / "run", ranks)), THIS_PROCESS)
    assert (searched.num_steps, searched.found) == (0, ())
