"""The first pass over ranks: the facts of each, its steps, and its operations described for matching across ranks."""

from dataclasses import dataclass

import numpy as np

from dtprof.analysis.memory.memory_formulas import ModelShare, find_share, list_labelled
from dtprof.analysis.memory.rank_memory import find_categories, find_largest, find_peak
from dtprof.analysis.pipeline.bubbles import RankPipeline, find_pipelines, infer_pipeline, may_be_stage
from dtprof.analysis.pipeline.inferred_stages import InferredStage
from dtprof.analysis.steps.step_boundaries import RankSteps, find_steps
from dtprof.analysis.steps.throughput import RankConsumption, find_consumption
from dtprof.job.api_names import find_apis
from dtprof.job.clock_alignment import collect_marks
from dtprof.job.collective_matching import RankInstances, describe_operations, match_operations
from dtprof.job.groups import Channel
from dtprof.job.rank_batches import RankBatch
from dtprof.records import codes, events
from dtprof.records.tables import Array, Group, OutOfMemory, RankTables, ids_named

_FORWARDS = frozenset((events.FORWARD, *events.PIPELINE_FORWARD))


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts of one rank that go to the summary unreduced."""

    rank: int
    attempt: int
    world_size: int
    pid: int
    host: str
    boot_id: str
    hook: str
    torch_version: str
    features: tuple[str, ...]
    groups: dict[int, Group]
    has_exception: bool
    ended_ns: int
    first_ns: int
    last_ns: int
    events: int
    capture_ns: int
    dropped_events: int
    errors: int
    truncated: bool
    closed: bool
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    peak_bytes: int | None
    memory_categories: dict[str, int | None]
    memory_bytes: dict[str, int]
    model_share: ModelShare
    out_of_memory: tuple[OutOfMemory, ...]
    unsound: int  # records with impossible times
    device_error_ns: int | None  # error bound of its device's clock; None: times are those of the host
    host_lead_ns: int | None
    polled: int  # intervals of its device whose end was found by polling
    skipped_marks: int  # that found no place
    captured_marks: int  # that fell into the capture of a graph
    graph_replays: int  # of CUDA graphs, whose operations are not recorded
    device_uuid: str  # of the accelerator that it computes on; empty: none, or not recorded
    infers_forward: bool  # none of its forward passes was recorded: what lies before a backward pass counts as one


@dataclass(frozen=True, kw_only=True)
class RankSurvey:
    """The first pass over one rank, however it is read."""

    facts: RankFacts
    steps: RankSteps
    pipeline: RankPipeline | None
    may_be_stage: bool  # of a pipeline of which no schedule was recorded
    inferred: tuple[InferredStage, RankPipeline] | str  # then: its place and its actions, else why they are not known
    marks: dict[Channel, Array]  # to align clocks; empty if all ranks share one clock
    consumption: RankConsumption | None  # None: not recorded


@dataclass(frozen=True, kw_only=True)
class Survey(RankSurvey):
    """The first pass over one rank whose records are read as a whole."""

    instances: RankInstances


def survey_batch(batch: RankBatch, *, several_clocks: bool = False) -> list[Survey]:
    """Find the steps of ranks and describe their operations."""
    matched = match_operations(batch)
    apis = [find_apis(tables, batch.operations.of(i)) for i, tables in enumerate(batch.tables)]
    described = describe_operations(batch, apis, matched)
    steps = find_steps(batch)
    pipelines = find_pipelines(batch, steps)
    found = []
    for i, (tables, own) in enumerate(zip(batch.tables, matched, strict=True)):
        operations, spans = batch.operations.of(i), batch.spans.of(i)
        is_possible = pipelines[i] is None and may_be_stage(tables, operations, steps[i])
        found.append(
            Survey(
                facts=state_facts(
                    tables,
                    share=find_share(tables, list_labelled(tables, operations), pipelines[i]),
                    unsound=len(tables.operations) + len(tables.spans) - len(operations) - len(spans),
                ),
                steps=steps[i],
                instances=described[i],
                pipeline=pipelines[i],
                may_be_stage=is_possible,
                inferred=infer_pipeline(batch, i, steps[i]) if is_possible else "",
                marks=collect_marks(tables, operations, own) if several_clocks else {},
                consumption=find_consumption(tables, steps[i]),
            )
        )
    return found


def state_facts(tables: RankTables, *, share: ModelShare, unsound: int) -> RankFacts:
    """State the facts of one rank, given its share of the model and the number of its records that cannot be."""
    largest = find_largest(tables)
    return RankFacts(
        rank=tables.rank,
        attempt=tables.attempt,
        world_size=tables.world_size,
        pid=tables.pid,
        host=tables.host,
        boot_id=tables.boot_id,
        hook=tables.hook,
        torch_version=tables.torch_version,
        features=tables.features,
        groups=tables.groups,
        has_exception=bool(tables.exceptions),
        ended_ns=tables.ended_ns,
        first_ns=tables.first_ns,
        last_ns=tables.last_ns,
        events=tables.num_events,
        capture_ns=tables.capture_ns,
        dropped_events=tables.dropped_events,
        errors=tables.errors,
        truncated=tables.truncated,
        closed=tables.closed,
        notes=tables.notes,
        problems=tables.problems,
        peak_bytes=find_peak(largest),
        memory_categories=find_categories(largest),
        memory_bytes=largest,
        model_share=share,
        out_of_memory=tables.out_of_memory,
        unsound=unsound,
        device_error_ns=tables.device_error_ns,
        host_lead_ns=tables.host_lead_ns,
        polled=int(np.count_nonzero(tables.device_intervals["flags"] & codes.DEVICE_POLLED)),
        skipped_marks=_largest_sample(tables, events.DEVICE_MARKS_SKIPPED),
        captured_marks=_largest_sample(tables, events.DEVICE_MARKS_CAPTURED),
        graph_replays=int(np.count_nonzero(ids_named(tables.ops, (events.GRAPH_REPLAY,))[tables.spans["op"]])),
        device_uuid=tables.device_uuid,
        infers_forward=bool(tables.hook) and _FORWARDS.isdisjoint(tables.ops) and events.BACKWARD in tables.ops,
    )


def _largest_sample(tables: RankTables, name: str) -> int:
    """Return the largest value of a sample that counts, 0 where there is none."""
    values = tables.samples["value"][ids_named(tables.ops, (name,))[tables.samples["op"]]]
    return int(values.max(initial=0))
