"""What differs between two runs: known delays are found, noise is not, and what cannot be compared is said."""

import pytest

from dtprof.analysis.comparison.comparison_series import COLLECTIVES, JOB, RANKS, Figure, measure_run
from dtprof.analysis.comparison.run_comparison import AT_LEAST, Comparison, FigureChange, compare_runs
from dtprof.analysis.results import PARTS
from dtprof.analysis.run_summary import summarise
from tests.analysis.noisy_runs import noisy_run
from tests.builders import MemoryRun, RankBuilder

NUM_PAIRS = 80
MS = 1_000_000


def compare(a: MemoryRun, b: MemoryRun, at_least: float = AT_LEAST) -> Comparison:
    return compare_runs(measure_run(a), measure_run(b), at_least=at_least)


def change_of(result: Comparison, name: str, *, table: str = JOB, rank: int = -1) -> FigureChange:
    (found,) = [
        c for c in result.changes if (c.figure.table, c.figure.name, c.figure.rank) == (table, name, rank)
    ]  # fmt: skip
    return found


def regular(num_ranks: int = 2, num_steps: int = 12, late_rank: int | None = None, **chosen: int) -> MemoryRun:
    """Return steps of 100 ms without noise: backward 70, an all_reduce of 20 in it, optimizer 10."""
    ranks = [RankBuilder(rank, world_size=num_ranks, **chosen) for rank in range(num_ranks)]
    for rank in ranks:
        for step in range(num_steps):
            begin, late = step * 100 * MS, 10 * MS if rank.rank == late_rank else 0
            rank.span("backward", begin + 10 * MS, begin + 80 * MS)
            rank.op("all_reduce", begin + 60 * MS + late, begin + 80 * MS, is_async=True, nbytes=4096)
            rank.span("optimizer", begin + 80 * MS, begin + 90 * MS)
    return MemoryRun(ranks)


def test_means_are_those_of_the_steps() -> None:
    # As in the summary: host 10, compute 70 (80 on the late rank), wait 10 (0), transfer 10, optimizer 10.
    figures = measure_run(regular(late_rank=1))
    means = {(f.table, f.name, f.rank): e.mean / MS for f, e in figures.estimates.items() if f.unit == "ns"}
    assert means[JOB, "step_ns", -1] == 100
    assert (means[RANKS, "compute_ns", 0], means[RANKS, "compute_ns", 1]) == (70, 80)
    assert means[JOB, "compute_ns", -1] == 75
    assert (means[RANKS, "exposed_wait_ns", 0], means[RANKS, "exposed_wait_ns", 1]) == (10, 0)
    assert means[JOB, "exposed_ns", -1] == 15
    assert means[COLLECTIVES, "wait_ns", -1] == 5
    assert means[COLLECTIVES, "transfer_ns", -1] == 10
    assert sum(means[JOB, f"{part}_ns", -1] for part in PARTS) == 100
    assert figures.exposed_fraction is not None
    assert figures.exposed_fraction.mean == pytest.approx(0.15)
    assert figures.wait_fraction is not None
    assert figures.wait_fraction.mean == pytest.approx(0.05)
    assert figures.estimates[Figure(COLLECTIVES, "bytes", group="default_pg", members=2, op="all_reduce")].mean == 4096
    assert figures.used == (2, 12)


def test_ranks_without_any_operation_are_compared_by_the_rest() -> None:
    # Steps of 100 ms: backward 70, optimizer 10, nothing communicated; 30 ms longer where one rank's backward is.
    def run(backward: int) -> MemoryRun:
        rank = RankBuilder(0, world_size=1)
        for step in range(12):
            begin = step * (30 + backward) * MS
            rank.span("backward", begin + 10 * MS, begin + (10 + backward) * MS)
            rank.span("optimizer", begin + (10 + backward) * MS, begin + (20 + backward) * MS)
        return MemoryRun([rank])

    result = compare(run(70), run(100))
    assert change_of(result, "step_ns").difference == 30 * MS
    assert not [change for change in result.changes if change.figure.table == COLLECTIVES]


def test_means_agree_with_the_summary() -> None:
    run = noisy_run(3, num_ranks=4)
    figures, summary = measure_run(run), summarise(run)
    assert figures.used == summary.steps.used
    for rank in summary.ranks:
        assert rank.partition_ns is not None
        for part, mean in {**rank.partition_ns, "step": rank.step_ns}.items():
            assert figures.estimates[Figure(RANKS, f"{part}_ns", rank=rank.rank)].mean == pytest.approx(mean, abs=2)
    (row,) = summary.collectives
    exposed = Figure(COLLECTIVES, "exposed_ns", group="default_pg", members=4, op="all_reduce", api="all_reduce")
    assert figures.estimates[exposed].mean == pytest.approx(row.exposed_ns, abs=2)
    assert figures.peak_bytes == {rank.rank: rank.peak_bytes for rank in summary.ranks}


def test_pairs_of_runs_of_one_job_raise_few_false_alarms() -> None:
    # The runs of a pair differ by nothing but noise that remembers half of the step before. The family of all figures
    # may raise an alarm in 5 % of pairs; of 80 that is 4, and 10 or more have a chance below 1 %.
    alarms = 0
    for pair in range(NUM_PAIRS):
        a, b = (noisy_run(2 * pair + i, num_steps=30, memory=0.5) for i in range(2))
        alarms += compare(a, b, at_least=0.0).differs
    assert alarms < 10


@pytest.mark.parametrize("delay_us", [1_500.0, 4_000.0])
def test_a_delay_of_known_size_lies_in_its_interval(delay_us: float) -> None:
    missed = unseen = 0
    for seed in range(25):
        a = noisy_run(1000 + 2 * seed, num_steps=60, memory=0.3)
        b = noisy_run(1001 + 2 * seed, num_steps=60, memory=0.3, delay_us=delay_us)
        found = compare(a, b).step
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        missed += not found.low <= 1000 * delay_us <= found.high
        unseen += found.verdict != "larger"
    assert missed <= 2
    assert unseen <= 1


def test_a_slow_rank_is_distinguished_from_the_one_that_waits_for_it() -> None:
    a, b = noisy_run(1, num_steps=60), noisy_run(2, num_steps=60, delay_us=3_000, slow_rank=1)
    result = compare(a, b)
    slow, waits = (
        change_of(result, "compute_ns", table=RANKS, rank=1),
        change_of(result, "compute_ns", table=RANKS, rank=0),
    )
    assert slow.verdict == "larger"
    assert slow.low is not None
    assert slow.high is not None
    assert slow.low <= 3_000_000 <= slow.high
    assert waits.verdict == "none"
    assert change_of(result, "exposed_wait_ns", table=RANKS, rank=0).verdict == "larger"
    assert change_of(result, "exposed_transfer_ns").verdict == "none"


def test_a_slower_collective_is_recognised_by_its_transfer() -> None:
    result = compare(noisy_run(1, num_steps=60), noisy_run(2, num_steps=60, slower_reduce_us=1_000))
    verdicts = {c.figure.name: c.verdict for c in result.of_table(COLLECTIVES)}
    assert verdicts["transfer_ns"] == verdicts["exposed_ns"] == "larger"
    assert verdicts["count"] == verdicts["bytes"] == verdicts["wait_ns"] == "none"
    assert change_of(result, "compute_ns").verdict == "none"


def test_the_order_of_the_runs_turns_signs_and_nothing_else() -> None:
    a, b = noisy_run(5), noisy_run(6, delay_us=1_000, extra_bytes=1 << 26)
    opposite = {"larger": "smaller", "smaller": "larger"}
    there, back = compare(a, b), compare(b, a)
    assert [c.figure for c in there.changes] == [c.figure for c in back.changes]
    for one, other in zip(there.changes, back.changes, strict=True):
        assert other.verdict == opposite.get(one.verdict, one.verdict)
        if one.low is not None and one.difference is not None and other.high is not None:
            assert other.difference == -one.difference
            assert other.high == -one.low
            assert other.detectable == one.detectable


def test_a_run_does_not_differ_from_itself() -> None:
    run = noisy_run(5)
    result = compare(run, run)
    assert {c.difference for c in result.changes if c.verdict == "none"} == {0}
    assert not result.differs


def test_what_is_sure_but_small_does_not_count() -> None:
    # Memory that hardly varies: 4 MiB of 1 GiB are beyond its noise, and less than 1 %.
    a, b = noisy_run(1), noisy_run(2, extra_bytes=4 << 20)
    assert change_of(compare(a, b), "rss_bytes").verdict == "negligible"
    assert change_of(compare(a, b, at_least=0.0), "rss_bytes").verdict == "larger"
    assert change_of(compare(a, noisy_run(2, extra_bytes=40 << 20)), "rss_bytes").verdict == "larger"


def test_what_could_have_been_seen_is_seen_four_times_of_five() -> None:
    seen = tried = 0
    for seed in range(40):
        a = noisy_run(2 * seed, num_steps=40, memory=0.0)
        step = compare(a, noisy_run(2 * seed + 1, num_steps=40, memory=0.0)).step
        assert step is not None
        assert step.detectable is not None
        delayed = noisy_run(2 * seed + 1, num_steps=40, memory=0.0, delay_us=step.detectable / 1000)
        again = compare(a, delayed).step
        assert again is not None
        seen += again.verdict == "larger"
        tried += 1
    assert 0.6 <= seen / tried <= 0.97


def test_throughput_is_what_all_steps_consumed_over_their_time() -> None:
    # Two ranks of 640 tokens each in 10 sequences: 1,280 tokens and 20 samples a step.
    a, b = noisy_run(1, num_steps=60, tokens=640), noisy_run(2, num_steps=60, tokens=640, delay_us=3_000.0)
    result = compare(a, b)
    step = change_of(result, "step_ns")
    for name, a_step in (("tokens_per_s", 1280), ("samples_per_s", 20)):
        rate = change_of(result, name)
        assert rate.verdict == "smaller"
        assert rate.a is not None
        assert rate.b is not None
        assert step.a is not None
        assert step.b is not None
        assert rate.a == pytest.approx(a_step * 1e9 / step.a)
        assert rate.b == pytest.approx(a_step * 1e9 / step.b)
    # The noise of a rate, as a share of it, is that of the step.
    figures = measure_run(a).estimates
    of_rate, of_step = (figures[Figure(JOB, name)] for name in ("tokens_per_s", "step_ns"))
    assert of_rate.variance**0.5 / of_rate.mean == pytest.approx(of_step.variance**0.5 / of_step.mean, rel=0.01)


def test_throughput_that_one_run_did_not_record_is_not_judged_and_of_neither_not_shown() -> None:
    told, silent = noisy_run(1, tokens=640), noisy_run(2)
    change = change_of(compare(told, silent), "tokens_per_s")
    assert (change.verdict, change.b) == ("unknown", None)
    assert change.reason.startswith("B: no model was given token ids")
    assert not [c for c in compare(silent, silent).changes if c.figure.name.endswith("_per_s")]
    short = noisy_run(1, tokens=32)  # no whole sequence of 64
    rates = [c.figure.name for c in compare(short, short).changes if c.figure.name.endswith("_per_s")]
    assert rates == ["tokens_per_s"]


def test_peaks_are_shown_and_not_judged() -> None:
    peak = change_of(compare(noisy_run(1), noisy_run(2)), "peak_bytes")
    assert (peak.a, peak.b, peak.verdict) == ((1 << 30) + (1 << 28), (1 << 30) + (1 << 28), "unknown")
    assert "one number a run" in peak.reason


def test_another_world_size_leaves_out_ranks_and_compares_the_job() -> None:
    result = compare(noisy_run(1), noisy_run(2, num_ranks=4))
    assert any("A has 2 ranks, B 4" in reason for reason in result.cannot_compare)
    assert result.of_table(RANKS) == ()
    assert result.step is not None
    assert result.step.low is not None
    # The all_reduces have 2 and 4 members: none is in both.
    assert result.of_table(COLLECTIVES) == ()
    assert any("2 collectives" in reason for reason in result.cannot_compare)


def test_another_layout_is_described() -> None:
    a, b = regular(num_ranks=4), regular(num_ranks=4)
    for number, (run, axis) in enumerate(((a, "mesh_dp"), (b, "mesh_tp"))):
        for rank in run.ranks:
            assert isinstance(rank, RankBuilder)
            rank.group("1", (0, 1) if rank.rank < 2 else (2, 3), axis)
        (a, b)[number].__post_init__()
    result = compare(a, b)
    (reason,) = [reason for reason in result.cannot_compare if reason.startswith("layout")]
    assert "2 dp groups of 2" in reason
    assert "2 tp groups of 2" in reason
    assert result.of_table(RANKS) == ()
    assert result.of_table(COLLECTIVES) != ()


def test_a_run_without_steps_is_not_compared() -> None:
    result = compare(noisy_run(1), noisy_run(2, num_steps=1))
    assert any(reason.startswith("steps: B has no step") for reason in result.cannot_compare)
    assert {c.figure.name for c in result.changes} == {"peak_bytes"}
    assert not result.differs


def test_few_steps_are_shown_and_not_judged() -> None:
    result = compare(noisy_run(1), noisy_run(2, num_steps=6))
    assert any("(B 5;" in reason for reason in result.cannot_compare)
    assert {c.verdict for c in result.changes} == {"unknown"}
    assert result.step is not None
    assert result.step.difference is not None


def test_ranks_that_left_no_record_are_named() -> None:
    whole, part = regular(num_ranks=2), MemoryRun(regular(num_ranks=2).ranks[:1])
    result = compare(whole, part)
    assert any("B lacks rank 1" in reason for reason in result.cannot_compare)
    unknown = change_of(result, "step_ns", table=RANKS, rank=1)
    assert (unknown.verdict, unknown.b, unknown.reason) == ("unknown", None, "B: not measured")


def test_operations_whose_end_was_not_seen_leave_only_the_step() -> None:
    unseen = regular()
    for rank in unseen.ranks:
        assert isinstance(rank, RankBuilder)
        for operation in rank._operations:
            operation.update(flags=0, done_ns=-1, state=2)
    unseen.__post_init__()
    result = compare(regular(), unseen)
    assert change_of(result, "step_ns").verdict == "none"
    compute = change_of(result, "compute_ns")
    assert (compute.verdict, compute.b) == ("unknown", None)
    assert "did not see when operations were done" in compute.reason


def test_a_collective_that_only_one_run_makes_is_a_difference() -> None:
    more = regular()
    for rank in more.ranks:
        assert isinstance(rank, RankBuilder)
        for step in range(12):
            rank.op("broadcast", step * 100 * MS + 1 * MS, step * 100 * MS + 5 * MS, nbytes=64)
    more.__post_init__()
    result = compare(regular(), more)
    (count,) = [c for c in result.of_table(COLLECTIVES) if c.figure.op == "broadcast" and c.figure.name == "count"]
    assert (count.a, count.b, count.verdict) == (0, 1, "larger")


def test_an_empty_run_says_so() -> None:
    result = compare(MemoryRun([]), regular())
    assert any(reason.startswith("steps: A has no step") for reason in result.cannot_compare)


def test_times_of_devices_and_of_hosts_are_not_compared_silently() -> None:
    device = RankBuilder(0, world_size=1)
    for step in range(12):
        for name, begin, end in (("backward", 0, 700), ("optimizer", 700, 900)):
            host = ((100 * step + begin // 10) * 1_000, (100 * step + end // 10) * 1_000)
            times = ((1_000 * step + begin + 500) * 1_000, (1_000 * step + end + 500) * 1_000)
            device.span(name, *host)
            device.device_interval("phase", name, *times, host=host)
    of_device, of_host = MemoryRun([device]), regular(1)
    reasons = compare(of_device, of_host).cannot_compare
    assert any(
        reason.startswith("clock: times of A are those of its devices, of B those of its hosts") for reason in reasons
    )
    assert not any(reason.startswith("clock") for reason in compare(of_device, of_device).cannot_compare)
