"""Details of a run as the analysis would return them, to go with example_summaries.py."""

from dataclasses import replace

import numpy as np

from dtprof.analysis.communication.rank_pairs import pair_ranks
from dtprof.analysis.communication.traffic import Lateness, Traffic
from dtprof.analysis.memory.device_series import DeviceSeries, NodeSeries
from dtprof.analysis.memory.memory_series import MemorySeries, RankMemory, SampleSeries
from dtprof.analysis.pipeline.schedule_changes import Changes, ScheduleChange
from dtprof.analysis.pipeline.schedule_chart import ChartAction, PipelineChart, StageTime
from dtprof.analysis.results import PipelineRank, PipelineResult, Summary, TimelineBar
from dtprof.analysis.steps.phase_series import StepPhases
from dtprof.analysis.timeline.run_closeup import Closeup, Tracks
from dtprof.analysis.timeline.run_tracks import COMMUNICATION, WORK, Track
from dtprof.analysis.whatif.prediction import Prediction, Scenario
from dtprof.analysis.whatif.replayed_steps import ReplayedStep
from dtprof.analysis.whatif.slowdowns import Slowdowns
from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.report.figures.figure_source import Source
from tests.report.example_summaries import MS, STEP_NS, summary_of

MIB = 1 << 20
KINDS = ("forward", "backward", "overlapped", "exposed")
NAMES = ("(one of many)", "forward", "backward", "all_reduce (ddp) of default_pg, 25.0 MiB")


def source_of(
    *, num_ranks: int = 4, num_steps: int = 20, bars_each: int = 200, verdict: Verdict | None = None
) -> Source:
    """Return a run with a pipeline of two stages: F 10 ms, B 20 ms, two microbatches, GPipe."""
    summary = with_pipeline(summary_of(num_ranks=num_ranks, num_steps=num_steps))
    return Source(summary=summary, closeup=closeup_of(summary, bars_each=bars_each), verdict=verdict, nodes=nodes_of(2))


def prediction_of() -> Prediction:
    """Return a prediction of a run of two ranks: rank 1 computes 60 ms of 100, rank 0 40 and waits for it."""
    scenarios = (
        Scenario(fix=("compute=1.5x",), step_ns=67.0 * MS, gain=0.33, interval=(0.32, 0.34)),
        Scenario(fix=("rank=1",), step_ns=80.0 * MS, gain=0.2, interval=(0.18, 0.21), assumes="as now"),
        Scenario(fix=("buckets=52428800",), step_ns=100.0 * MS, gain=0.0, interval=(-0.01, 0.01)),
    )
    return Prediction(
        run="run",
        steps=(3, 18),
        measured_step_ns=100.0 * MS,
        replayed_step_ns=101.0 * MS,
        replay_error=0.01,
        slowdowns=Slowdowns(
            replayed_ns=100.0 * MS,
            ideal_ns=80.0 * MS,
            by_operation={"forward": 1.2, "all_reduce dp": 1.01},
            by_rank={1: 1.25, 0: 1.0},
            by_stage={},
            m_w=1.0,
            m_s=None,
        ),
        scenarios=scenarios,
        timelines=tuple(
            ReplayedStep(
                title=title,
                step_ns=length * MS,
                ranks=(0, 1),
                intervals=(
                    _replayed(0, "forward", 0, 40),
                    _replayed(0, "exposed_wait", 40, length),
                    _replayed(1, "forward", 0, length),
                ),
            )
            for title, length in (("as it was", 60), ("rank 1 as fast as the others", 40))
        ),
    )


def _replayed(rank: int, kind: str, begin: int, end: int) -> TimelineBar:
    return TimelineBar(
        rank=rank, lane="phases", name=kind, kind=kind, begin_ns=begin * MS, end_ns=end * MS, label=f"{kind} on {rank}"
    )


def nodes_of(num_nodes: int, *, gpus_each: int = 0) -> NodeSeries:
    """Return nodes sampled once a second for a minute: host N is busy for N+1 tenths, each GPU for half of the time."""
    t_ns = np.arange(60, dtype=np.int64) * 1000 * MS
    devices = []
    for number in range(num_nodes):
        values = {"busy": np.full(60, (number + 1) / 10), "memory": np.full(60, 3.0 * 1024 * MIB)}
        devices.append(DeviceSeries(host=f"host-{number}", device="host", t_ns=t_ns, values=values))
        for gpu in range(gpus_each):
            values = {"busy": np.full(60, 0.5), "power": np.full(60, 300.0), "temperature": np.full(60, 61.0)}
            devices.append(DeviceSeries(host=f"host-{number}", device=f"gpu {gpu}", t_ns=t_ns, values=values))
    reasons = {} if gpus_each else {f"host-{number}": "NVML cannot be used" for number in range(num_nodes)}
    return NodeSeries(devices=tuple(devices), no_gpus=reasons)


def with_pipeline(summary: Summary) -> Summary:
    """Return the run with the result of a pipeline: the window is 90 ms, each of two ranks is busy for 60."""
    ranks = tuple(
        replace(
            rank,
            memory_categories={
                "parameters": 100 * MIB,
                "gradients": 100 * MIB,
                "optimizer_state": 200 * MIB,
                "activations": 300 * MIB,
                "communication": None,
                "other": 50 * MIB,
            },
        )
        for rank in summary.ranks
    )
    pipeline = PipelineResult(
        schedule="GPipe",
        stages=2,
        ranks=2,
        microbatches=2,
        bubble_fraction=1 / 3,
        theory_fraction=1 / 3,
        parts={"schedule": 1 / 3, "imbalance": 0.0, "exposed_p2p": 0.0, "jitter": 0.0},
        per_rank=tuple(PipelineRank(rank=rank.rank, bubble_ns=30 * MS) for rank in summary.ranks),
        by_time={"warm_up": 0.1, "steady": 0.1, "drain": 2 / 15},
    )
    return replace(summary, ranks=ranks, pipeline=pipeline)


def chart_of() -> PipelineChart:
    """Return GPipe: F0 F1 B0 B1 on stage 1 from 10 ms on, stage 0 waits between; planned as measured."""
    times = [(0, "F", 0, 0), (0, "F", 1, 10), (1, "F", 0, 10), (1, "F", 1, 20)]
    times += [(1, "B", 0, 30), (1, "B", 1, 50), (0, "B", 0, 50), (0, "B", 1, 70)]
    actions = tuple(
        ChartAction(
            rank=stage,
            stage=stage,
            kind=kind,
            microbatch=microbatch,
            begin_ns=at * MS,
            end_ns=(at + {"F": 10, "B": 20}[kind]) * MS,
        )
        for stage, kind, microbatch, at in times
    )
    return PipelineChart(
        step=10,
        ranks=(0, 1),
        stages=((0,), (1,)),
        planned=actions,
        planned_ns=90 * MS,
        measured=actions,
        measured_ns=90 * MS,
        stage_times=tuple(
            StageTime(stage=stage, ranks=(stage,), mean_ns={"F": 10 * MS, "B": 20 * MS}) for stage in (0, 1)
        ),
        changes=Changes(
            found=(
                ScheduleChange(what="as it is: 2 microbatches", schedule_fraction=1 / 3, bubble_fraction=1 / 3),
                ScheduleChange(what="4 microbatches", schedule_fraction=0.2, bubble_fraction=0.2),
            )
        ),
    )


def tracks_of(num_ranks: int, *, bars_each: int = 200) -> Tracks:
    """Return ranks that turn forward 6 ms and backward 12 ms with an operation of 4 ms in it, each third exposed."""
    turns = np.arange(bars_each // 3, dtype=np.int64)
    begin = np.stack((turns * 20 * MS, turns * 20 * MS + 6 * MS, turns * 20 * MS + 8 * MS), axis=1).reshape(-1)
    length = np.tile(np.array([6, 12, 4], np.int64) * MS, len(turns))
    kind = np.stack((turns * 0, turns * 0 + 1, np.where(turns % 3, 2, 3)), axis=1).reshape(-1)
    lane = np.tile(np.array([WORK, WORK, COMMUNICATION]), len(turns))
    return Tracks(
        origin_ns=0,
        end_ns=int((begin + length).max()),
        kinds=KINDS,
        names=NAMES,
        tracks=tuple(
            Track(
                rank=rank,
                begin_ns=begin,
                length_ns=length,
                lane=lane.astype(np.uint8),
                kind=kind.astype(np.uint8),
                name=np.tile(np.array([1, 2, 3], np.uint16), len(turns)),
                left_out=0,
                step_ends_ns=np.arange(1, 1 + len(turns) // 10, dtype=np.int64) * STEP_NS,
            )
            for rank in range(num_ranks)
        ),
        left_out=0,
    )


def closeup_of(summary: Summary, *, bars_each: int = 200) -> Closeup:
    """Return the details of a run; of memory a sample a step, of messages those between neighbours."""
    ranks = tuple(rank.rank for rank in summary.ranks)
    steps = np.arange(1, 21, dtype=np.int64)
    series = SampleSeries(t_ns=steps * STEP_NS, step=steps, value=steps * MIB + 500 * MIB)
    return Closeup(
        coordinates={
            rank: {"pp": rank * 2 // max(2, len(ranks)), "dp": rank % max(1, len(ranks) // 2)} for rank in ranks
        },
        tracks=tracks_of(len(ranks), bars_each=bars_each),
        pipeline=chart_of(),
        prediction=prediction_of(),
        memory=MemorySeries(
            ranks={rank: RankMemory(total="rss_bytes", samples={"rss_bytes": series}) for rank in ranks},
            worst=max(summary.ranks, key=lambda rank: rank.peak_bytes or 0).rank if ranks else None,
            phases=StepPhases(
                first=steps, last=steps, mean_ns={"forward": np.full(20, 40.0 * MS), "backward": np.full(20, 60.0 * MS)}
            ),
        ),
        traffic=Traffic(
            ranks=ranks,
            sent=pair_ranks(ranks, {rank: {rank + 1: 5 * MIB} for rank in ranks}),
            lateness=(
                Lateness(
                    group="0",
                    ranks=ranks,
                    last={ranks[-1]: 30, 0: 10},
                    spread_ns=(MS, 2 * MS, 5 * MS, 9 * MS),
                    count=50,
                ),
            ),
        ),
    )


def hang_of(summary_text: str = "rank 2 never called all_reduce #7") -> Verdict:
    """Return the verdict on a hang with one finding."""
    return Verdict(
        outcome="hang",
        source=("run",),
        ranks_seen=(0, 1, 2, 3),
        ranks_missing=(),
        findings=(
            Finding(
                kind="missing-rank",
                summary=summary_text,
                culprit_ranks=(2,),
                grade=0.95,
                waiting_ranks=(0, 1, 3),
                op="all_reduce",
                seq=7,
                step=3,
                evidence=("ranks 0, 1, 3 are inside all_reduce #7", "rank 2 is outside of torch.distributed"),
                advice=("Look at the branch that rank 2 took.",),
            ),
        ),
    )
