"""Summaries as the analysis would return them, built from a few numbers that can be checked by hand."""

from dataclasses import replace

from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.analysis.results import (
    PARTS,
    PHASES,
    CallLine,
    CallSiteResult,
    Caveat,
    CollectiveResult,
    GroupResult,
    MessageSizes,
    Overhead,
    PhaseCommunication,
    RankResult,
    Spread,
    Steps,
    StepSeries,
    StragglerResult,
    Summary,
    Timeline,
    TimelineBar,
)

MS = 1_000_000
STEP_NS = 200 * MS
"""compute 90 + exposed transfer 20 + exposed wait 60 + data 10 + optimizer 12 + other host 8 = 200 ms."""
PARTITION_NS = {
    **dict.fromkeys(PARTS, 0),
    "compute": 90 * MS,
    "exposed_transfer": 20 * MS,
    "exposed_wait": 60 * MS,
    "data": 10 * MS,
    "optimizer": 12 * MS,
    "host": 8 * MS,
}
PHASES_NS = {
    **dict.fromkeys(PHASES, 0),
    "data": 10 * MS,
    "forward": 50 * MS,
    "backward": 120 * MS,
    "optimizer": 12 * MS,
    "other": 8 * MS,
}
LATE_RANK = 2
"""This rank computes 50 ms longer and waits 50 ms less."""


def partition_of(rank: int) -> dict[str, int]:
    """Return the parts of the step of a rank: all sum to 200 ms."""
    if rank != LATE_RANK:
        return dict(PARTITION_NS)
    return {**PARTITION_NS, "compute": 140 * MS, "exposed_wait": 10 * MS}


def summary_of(*, num_ranks: int = 4, num_steps: int = 20, run: str = "dtprof-runs/20261121-101500-train") -> Summary:
    """Return a complete run on one host; steps 3 to the last are used, step 2 takes ten times longer."""
    ranks = range(num_ranks)
    series = tuple(
        StepSeries(
            rank=rank,
            duration_ns=tuple(
                10 * STEP_NS if step == 2 else STEP_NS + (rank * 131 + step * 37) % 11 * MS
                for step in range(2, num_steps + 1)
            ),
        )
        for rank in ranks
    )
    return Summary(
        run=run,
        command=("torchrun", "--nproc-per-node", str(num_ranks), "train.py"),
        world_size=num_ranks,
        hosts=("node-a",),
        backend="gloo",
        torch="2.13.0",
        hook="native",
        complete=True,
        missing_ranks=(),
        dropped_events=0,
        events=1234 * num_ranks,
        clock_error_ns=0,
        wall_ns=num_steps * STEP_NS,
        overhead=Overhead(capture_ns_per_event=850, capture_ns_total=1234 * num_ranks * 850, share_of_step=0.0004),
        groups=(
            GroupResult(name="0", description="default_pg", ranks=tuple(ranks), axis=None),
            GroupResult(name="1", description="dp", ranks=tuple(ranks)[::2], axis="dp"),
        ),
        steps=Steps(
            count=num_steps,
            used=(3, num_steps),
            duration_ns=Spread(median=STEP_NS, p10=STEP_NS - 2 * MS, p90=STEP_NS + 9 * MS),
        ),
        step_series=series,
        ranks=tuple(
            RankResult(
                rank=rank,
                step_ns=STEP_NS,
                partition_ns=partition_of(rank),
                phases_ns=dict(PHASES_NS),
                peak_bytes=(512 + rank % 8) * 2**20,
                memory_categories={},
                events=1234,
                ended=RankEnd(EndState.FINISHED),
                waited_for_ns={LATE_RANK: 50 * MS, 0: MS} if rank != LATE_RANK else {},
            )
            for rank in ranks
        ),
        collectives=_collectives(num_steps) if num_ranks > 1 else (),
        call_sites=_call_sites() if num_ranks > 1 else (),
        communication_phases=(
            PhaseCommunication(
                phase="backward",
                count_per_step=4.0,
                bytes_per_step=100 * 2**20,
                exposed_ns_per_step=80 * MS,
                wait_ns_per_step=60 * MS,
                transfer_ns_per_step=40 * MS,
            ),
        )
        if num_ranks > 1
        else (),
        message_sizes=(
            MessageSizes(
                axis="dp",
                ranks=num_ranks,
                op="all_reduce",
                from_bytes=16 * 2**20,
                below_bytes=32 * 2**20,
                count_per_step=4.0,
                bytes_per_step=100 * 2**20,
                exposed_ns_per_step=80 * MS,
                transfer_ns_per_step=40 * MS,
                algbw_gb_per_s=2.6,
                busbw_gb_per_s=3.9,
            ),
        )
        if num_ranks > 1
        else (),
        stragglers=(StragglerResult(rank=2, last_share=0.86, slowdown=1.33, blame_ns_per_step=150 * MS),)
        if num_ranks > LATE_RANK
        else (),
        timeline=timeline_of(num_ranks),
        cannot_tell=(Caveat("", "The pipeline schedule is not known: no pipeline actions were recorded."),),
    )


def _call_sites() -> tuple[CallSiteResult, ...]:
    known = CallSiteResult(
        line=CallLine(file="/home/me/train.py", line=41, function="train"),
        phase="backward",
        axis="dp",
        op="all_reduce",
        api="ddp",
        count_per_step=4.0,
        bytes=25 * 2**20,
        exposed_ns_per_step=80 * MS,
        wait_ns_per_step=60 * MS,
        transfer_ns_per_step=40 * MS,
    )
    return (known, replace(known, line=None, phase="other", api=None, exposed_ns_per_step=None))


def _collectives(num_steps: int) -> tuple[CollectiveResult, ...]:
    return (
        CollectiveResult(
            group="0",
            op="all_reduce",
            api="ddp",
            count=4 * num_steps,
            bytes=25 * 2**20,
            duration_ns=25 * MS,
            wait_ns=15 * MS,
            transfer_ns=10 * MS,
            exposed_ns=20 * MS,
            overlap=0.2,
            busbw_gb_per_s=3.9,
        ),
        CollectiveResult(
            group="0",
            op="barrier",
            api=None,
            count=num_steps,
            bytes=0,
            duration_ns=300_000,
            wait_ns=250_000,
            transfer_ns=50_000,
            exposed_ns=300_000,
            overlap=0.0,
            busbw_gb_per_s=None,
        ),
        CollectiveResult(
            group="1",
            op="broadcast",
            api="user",
            count=3,
            bytes=4096,
            duration_ns=None,
            wait_ns=None,
            transfer_ns=None,
            exposed_ns=None,
            overlap=None,
            busbw_gb_per_s=None,
        ),
    )


def timeline_of(num_ranks: int, *, num_steps: int = 3, buckets: int = 4) -> Timeline:
    """Return steps of 200 ms: data 10, forward 50, backward 120 with all_reduces under its end, optimizer 12."""
    intervals = []
    for rank in range(num_ranks):
        for step in range(num_steps):
            begin = step * STEP_NS
            for name, length in PHASES_NS.items():
                if length:
                    intervals.append(
                        TimelineBar(
                            rank=rank,
                            lane="phases",
                            name=name,
                            kind=name,
                            begin_ns=begin,
                            end_ns=begin + length,
                            label=f"{name}\nstep {step + 10}, rank {rank}",
                        )
                    )
                    begin += length
            for bucket in range(buckets if num_ranks > 1 else 0):
                start = step * STEP_NS + 90 * MS + bucket * 22 * MS + (rank * 7 % 5) * MS
                last = bucket == buckets - 1
                intervals.append(
                    TimelineBar(
                        rank=rank,
                        lane="communication",
                        name="all_reduce",
                        kind="exposed" if last else "overlapped",
                        begin_ns=start,
                        end_ns=start + 18 * MS,
                        label=f"all_reduce, 25.0 MiB, group default_pg\nddp, bucket {bucket}\ntrain.py:42 train_step",
                    )
                )
    return Timeline(
        first_step=10,
        last_step=9 + num_steps,
        origin_ns=5_000 * MS,
        end_ns=num_steps * STEP_NS,
        intervals=tuple(intervals),
        left_out=0,
    )


def empty_summary() -> Summary:
    """Return a run that left almost nothing."""
    return replace(
        summary_of(num_ranks=1),
        backend=None,
        torch=None,
        hook=None,
        complete=False,
        events=0,
        clock_error_ns=None,
        wall_ns=None,
        overhead=Overhead(capture_ns_per_event=None, capture_ns_total=None, share_of_step=None),
        groups=(),
        steps=Steps(count=0, used=None, duration_ns=None),
        step_series=(),
        ranks=(
            RankResult(
                rank=0,
                step_ns=None,
                partition_ns=None,
                phases_ns=None,
                peak_bytes=None,
                memory_categories={},
                events=0,
                ended=RankEnd(EndState.UNKNOWN),
            ),
        ),
        collectives=(),
        stragglers=(),
        timeline=None,
        cannot_tell=(Caveat("", "No optimizer step was counted on rank 0, so no step can be split into its parts."),),
    )
