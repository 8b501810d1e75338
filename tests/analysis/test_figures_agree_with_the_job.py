"""The analysis of a real job against what the job measured itself with its own clock."""

import json
import statistics
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run
from tests import jobs

DELAY_S, LATER_S = 0.2, 0.1
STEPS = 12
PROGRAM = f"""
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step_ends, blocked = [], []
for step in range({STEPS}):
    if rank == 1:
        time.sleep({DELAY_S})  # the known truth: rank 1 is late in every step, twice
    loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    total = loss.detach().clone()
    if rank == 1:
        time.sleep({LATER_S})
    begin = time.monotonic_ns()
    dist.all_reduce(total)
    blocked.append(time.monotonic_ns() - begin)
    optimizer.step()
    step_ends.append(time.monotonic_ns())
Path(sys.argv[1], f"{{rank}}.json").write_text(json.dumps({{"ends": step_ends, "blocked": blocked}}))
dist.destroy_process_group()
"""


@pytest.mark.jobs
@pytest.mark.alone
def test_a_delay_injected_on_a_rank_is_found_as_its_blame_and_as_wait_of_the_other(tmp_path: Path) -> None:
    program = tmp_path / "late.py"
    program.write_text(PROGRAM)
    run = tmp_path / "run"
    jobs.recorded(run, jobs.forked(2, program, str(tmp_path)), "--no-native")
    summary = summarise(open_run(run))
    own = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    assert summary.complete
    assert summary.steps.count == STEPS
    assert summary.steps.used is not None
    first, last = summary.steps.used
    counts = {(row.op, row.api): row.count for row in summary.collectives}
    num_used = last - first + 1
    assert counts[("all_reduce", "all_reduce")] == num_used

    # Steps: the job's own clock, read just after optimizer.step() returned.
    for rank, told in zip(summary.ranks, own, strict=True):
        measured = (told["ends"][last - 1] - told["ends"][first - 2]) / num_used
        assert rank.step_ns == pytest.approx(measured, rel=0.02)

    # Both delays: exposed wait of rank 0, blame of rank 1, 10 % apart at most.
    delay_ns = (DELAY_S + LATER_S) * 1e9
    partition = summary.ranks[0].partition_ns
    assert partition is not None
    assert partition["exposed_wait"] == pytest.approx(delay_ns, rel=0.1)
    (straggler,) = summary.stragglers
    assert straggler.rank == 1
    assert straggler.blame_ns_per_step == pytest.approx(delay_ns, rel=0.1)

    # The call that the job timed itself: exposed time of its row is the mean over both ranks.
    (row,) = [row for row in summary.collectives if row.api == "all_reduce"]
    timed = statistics.mean(ns for told in own for ns in told["blocked"][first - 1 : last])
    assert row.exposed_ns is not None
    assert row.exposed_ns <= timed
    assert row.exposed_ns == pytest.approx(timed, rel=0.1)


@pytest.mark.jobs
@pytest.mark.alone
@pytest.mark.parametrize(
    ("layout", "fault", "rank", "phase", "delay_ms", "tolerance"),
    [
        pytest.param([], "slow-rank:rank=1,ms=1000", 1, "other", 1000, 0.1, marks=pytest.mark.thorough),
        # In each of four microbatches; less what the head of the model makes the other stage slower.
        (["--pp", "2"], "slow-stage:rank=0,ms=250", 0, "forward", 4 * 250, 0.3),
    ],
)
def test_a_slow_rank_of_the_trainer_is_to_blame_for_its_delay(
    layout: list[str], fault: str, rank: int, phase: str, delay_ms: int, tolerance: float, tmp_path: Path
) -> None:
    # The first stage waits for gradients and comes last to the all_reduce of every healthy step, too.
    run = tmp_path / "run"
    metrics = tmp_path / "metrics.jsonl"
    options = ["--preset", "tiny", "--steps", "8", *layout, "--fault", fault, "--metrics", str(metrics)]
    jobs.recorded(run, jobs.forked(2, "-m", "reference_trainer", *options))
    summary = summarise(open_run(run))
    (straggler,) = summary.stragglers
    assert (straggler.rank, straggler.phase) == (rank, phase)
    assert straggler.blame_ns_per_step == pytest.approx(delay_ms * 1e6, rel=tolerance)
    (waiter,) = straggler.waiters
    assert waiter.rank == 1 - rank
    # Not the same to the nanosecond: where both ranks wait within one step, some blame is passed on to the other.
    assert waiter.wait_ns == pytest.approx(straggler.blame_ns_per_step, rel=0.02)
    waits = summary.ranks[1 - rank].partition_ns
    assert waits is not None
    assert waits["exposed_wait"] + waits["bubble"] >= (1 - tolerance) * delay_ms * 1e6
    assert summary.critical_path is not None
    assert summary.critical_path.ranks[0].rank == rank
    # The trainer's own figure, of 24 sequences of 160 tokens a step, which both ranks share or divide between them.
    assert summary.throughput is not None
    assert summary.steps.used is not None
    first, last = summary.steps.used
    rates = [json.loads(line)["tokens_per_s"] for line in metrics.read_text().splitlines()[first - 1 : last]]
    assert summary.throughput.tokens_per_s == pytest.approx(statistics.median(rates), rel=0.1)
    assert (summary.throughput.tokens_per_step, summary.throughput.samples_per_step) == (24 * 160, 24)
