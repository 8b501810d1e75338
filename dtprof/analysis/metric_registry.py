"""Every figure of a summary, declared once: name, unit, definition, which way is better, its value, why it may be null.

From these entries follow the columns of the Python API, `dtprof export --format prometheus`, what trackers log, the
units of `check`, units and order of `compare`, the descriptions of TensorBoard's scalars, the tooltips of pages,
and the tables of docs/reference/metrics.md. A new figure is one entry here beside the function that computes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from dtprof.analysis.communication.traffic import measure_overlap
from dtprof.analysis.results import (
    PARTS,
    CallSiteResult,
    CollectiveResult,
    GroupLateness,
    MessageSizes,
    PartBand,
    PhaseCommunication,
    PipelineAction,
    PipelineStep,
    RankResult,
    StragglerResult,
    Summary,
    exposed_of,
)
from dtprof.records.events import CUDA_ALLOCATED_BYTES, CUDA_RESERVED_BYTES, RSS_BYTES

Of = TypeVar("Of")
IN_BASE_UNIT = {"ns": 1e9, "GB/s": 1e-9}
"""How much of a unit is one base unit of the same quantity: a second, a byte a second; 1 for other units."""
WHOLE_UNITS = ("ns", "bytes", "count")


@dataclass(frozen=True, kw_only=True)
class Metric(Generic[Of]):
    """One figure of the job, of a rank, of a row of collectives, or of a straggler."""

    name: str  # as JSON, tables, `check` and `compare` have it
    unit: str  # ns, bytes, count, fraction, tokens/s, samples/s, GB/s, ratio
    definition: str  # one sentence
    section: str  # heading of docs/reference/metrics.md that defines it in full
    value: Callable[[Of], float | None]
    better: Literal["lower", "higher", "neither"] = "neither"
    clock: Literal["", "device", "host"] = (
        ""  # whose time it is in: the device's where that was followed, or the host's
    )
    null: str = ""  # why it may be None; empty: it never is
    json: str = ""  # where `dtprof summary --json` has it, such as ranks[].step_ns; empty: it has it not
    note: str = ""  # more sentences for a tooltip
    tooltips: Mapping[str, str] = field(default_factory=dict)  # what panels call it
    compared: int = 0  # its place among the figures that `dtprof compare` shows; 0: it has it not
    is_column: bool = True  # the table of its kind in the Python API has it
    prometheus: str = ""  # name in `dtprof export --format prometheus`, after dtprof_finished_; in base units
    tracker: str = ""  # name in experiment trackers; in ms where it ends so

    @property
    def is_whole(self) -> bool:
        """Say whether its values are whole numbers."""
        return self.unit in WHOLE_UNITS

    def in_base_unit(self, of: Of) -> float | None:
        """Return the value in seconds, bytes, bytes a second, or as it is."""
        value, scale = self.value(of), IN_BASE_UNIT.get(self.unit, 1)
        return value if value is None or scale == 1 else value / scale

    @property
    def meaning(self) -> str:
        """Return the definition for a column of a table."""
        text = self.definition[:1].lower() + self.definition[1:].rstrip(".")
        return f"{text}; masked: {self.null}" if self.null else text

    @property
    def tooltip(self) -> str:
        """Return the definition for a page."""
        return f"{self.definition} {self.note}".rstrip()

    def tracked(self, of: Of) -> float | None:
        """Return the value as trackers have it."""
        value = self.value(of)
        return value if value is None or not self.tracker.endswith("_ms") else value / 1e6


def _of_steps(name: str, summary: Summary) -> float | None:
    spread = summary.steps.duration_ns
    return None if spread is None else getattr(spread, name)


def _rate(name: str, summary: Summary) -> float | None:
    return None if summary.throughput is None else getattr(summary.throughput, name)


def _of_pipeline(name: str, summary: Summary) -> float | None:
    return None if summary.pipeline is None else getattr(summary.pipeline, name)


def _imbalance(summary: Summary) -> float | None:
    return summary.exchanges[0].imbalance if summary.exchanges else None


def _of_worst_straggler(name: str, summary: Summary) -> float | None:
    worst = summary.worst_straggler
    return None if worst is None or worst.blame_ns_per_step is None else getattr(worst, name)


def _of_advice(name: str, summary: Summary) -> float | None:
    return None if summary.advice is None else getattr(summary.advice, name)


def _part(name: str, rank: RankResult) -> float | None:
    return (rank.partition_ns or {}).get(name)


def _largest(sample: str, rank: RankResult) -> float | None:
    return rank.memory_bytes.get(sample)


NO_STEPS = "no step has a begin and an end on every rank"
NO_PARTITION = "completion of its operations is not observed"
NO_WAITS = "not every member's arrival is known"
NO_ACTION = "the row is of the time after the last action of the rank"
SIZES_UNKNOWN = "the run was imported from records without sizes"
NO_BANDWIDTH = "the transfer is not known, or the operation is gather or scatter"

JOB: tuple[Metric[Summary], ...] = (
    Metric(
        name="step_ns",
        unit="ns",
        better="lower",
        definition="From the end of one optimizer step to the end of the next: the median over ranks and steps.",
        note="Beside it the tenth and ninetieth percentile. The first steps (warm-up) are left out. dtprof check and "
        "dtprof compare take the mean.",
        section="Steps",
        clock="device",
        value=partial(_of_steps, "median"),
        null=NO_STEPS,
        json="steps.duration_ns.median",
        tooltips={"key_figures": "step_time"},
        compared=1,
        tracker="step_median_ms",
    ),
    *(
        Metric(
            name=f"step_{percentile}_ns",
            unit="ns",
            better="lower",
            definition=f"The {words} percentile of the step time over ranks and measured steps.",
            section="Steps",
            clock="device",
            value=partial(_of_steps, percentile),
            null=NO_STEPS,
            json=f"steps.duration_ns.{percentile}",
            tracker=f"step_{percentile}_ms",
        )
        for percentile, words in (("p10", "tenth"), ("p90", "ninetieth"))
    ),
    Metric(
        name="tokens_per_s",
        unit="tokens/s",
        better="higher",
        definition="Tokens that the whole job consumes a second: the median over the measured steps.",
        note="Counted by the shapes of what the models are given, or as dtprof.step(tokens=N) says.",
        section="Throughput",
        clock="device",
        value=partial(_rate, "tokens_per_s"),
        null="no model was given token ids",
        json="tokens_per_s",
        tooltips={"key_figures": "throughput"},
        compared=2,
        prometheus="tokens_per_second",
        tracker="tokens_per_s",
    ),
    Metric(
        name="samples_per_s",
        unit="samples/s",
        better="higher",
        definition="Samples that the whole job consumes a second: the median over the measured steps.",
        section="Throughput",
        clock="device",
        value=partial(_rate, "samples_per_s"),
        null="no model was given a tensor",
        json="samples_per_s",
        compared=3,
        prometheus="batch_samples_per_second",
        tracker="samples_per_s",
    ),
    *(
        Metric(
            name=f"mean_{what}_per_s",
            unit=f"{what}/s",
            better="higher",
            definition=f"All {what} that the whole job consumed in the measured steps, over their time.",
            note="Frameworks print this rate: steps that are longer for an evaluation or a slow loader count in full.",
            section="Throughput",
            clock="device",
            value=partial(_rate, f"mean_{what}_per_s"),
            null=null,
            json=f"steps.mean_{what}_per_s",
        )
        for what, null in (("tokens", "no model was given token ids"), ("samples", "no model was given a tensor"))
    ),
    Metric(
        name="exposed_fraction",
        unit="fraction",
        better="lower",
        definition="Share of the step in which a rank does no other work because of communication: wait and transfer.",
        note="Wait: the last rank has not arrived; transfer: data moves. On GPU, communication not covered by compute; "
        "on CPU with gloo, time blocked in the call or in Work.wait().",
        section="Exposed time",
        clock="device",
        value=lambda summary: summary.exposed_share,
        null=NO_PARTITION,
        tooltips={"key_figures": "exposed_communication", "rank_grid": "exposed_communication"},
    ),
    Metric(
        name="wait_fraction",
        unit="fraction",
        better="lower",
        definition="Share of the step in which ranks wait in communication for another rank to arrive.",
        section="Exposed time",
        clock="device",
        value=lambda summary: (summary.part_shares or {}).get("exposed_wait"),
        null=NO_PARTITION,
    ),
    Metric(
        name="overlap",
        unit="fraction",
        better="higher",
        definition="1 - exposed / in flight, over all operations of the measured steps, weighed by the ranks in each.",
        note="100 % means that all communication is hidden behind work.",
        section="Overlap",
        clock="device",
        value=measure_overlap,
        null="no operation's completion is observed",
        tooltips={"key_figures": "overlap"},
    ),
    Metric(
        name="bubble_fraction",
        unit="fraction",
        better="lower",
        definition="Share of the pipeline's window, from its first forward to its last backward, in which its ranks do "
        "not compute.",
        note="Theory: what the schedule costs with equal times and free messages.",
        section="Pipeline bubble",
        clock="device",
        value=partial(_of_pipeline, "bubble_fraction"),
        null="no pipeline of torch.distributed.pipelining with all its ranks on one clock was recorded",
        json="pipeline.bubble_fraction",
        tooltips={"key_figures": "bubble"},
        compared=6,
        prometheus="bubble_ratio",
        tracker="bubble_fraction",
    ),
    Metric(
        name="theory_fraction",
        unit="fraction",
        better="lower",
        definition="The bubble that the schedule costs with equal times and free messages.",
        section="Pipeline bubble",
        value=partial(_of_pipeline, "theory_fraction"),
        null="no formula for the schedule, or no bubble_fraction",
        json="pipeline.theory_fraction",
    ),
    Metric(
        name="peak_bytes",
        unit="bytes",
        better="lower",
        definition="Highest memory of any rank: allocated by torch on its GPU, or resident memory of the process "
        "without a GPU.",
        note="Model state: parameters, gradients and optimizer state of that rank, measured and by ZeRO's formula; the "
        "page Memory has the assumptions.",
        section="Memory",
        value=lambda summary: max(
            (rank.peak_bytes for rank in summary.ranks if rank.peak_bytes is not None), default=None
        ),
        null="memory was not sampled",
        tooltips={"key_figures": "peak_memory"},
        compared=12,
        prometheus="peak_memory_bytes",
        tracker="peak_bytes",
    ),
    Metric(
        name="exchange_imbalance",
        unit="ratio",
        better="lower",
        definition="Bytes of the busiest member of an all_to_all with uneven splits, over the mean of the members.",
        note="Of the most uneven group, on the more uneven side of each: the tokens that a rank's experts get.",
        section="Exchanges",
        value=_imbalance,
        null="no all_to_all had uneven splits, or not all members recorded them",
    ),
    Metric(
        name="slowdown",
        unit="ratio",
        better="lower",
        definition="How many times longer a step takes than it would if the stragglers were like the other ranks.",
        note="A rank counts as a straggler by how many steps it is most to blame for, and by what that costs, not by "
        "one bad step.",
        section="Stragglers",
        clock="device",
        value=lambda summary: summary.straggler_slowdown,
        null="no rank holds the others up, or waits are not known",
        tooltips={"key_figures": "slowdown"},
    ),
    Metric(
        name="straggler_rank",
        unit="count",
        definition="The rank that the others wait for most.",
        section="Stragglers",
        value=partial(_of_worst_straggler, "rank"),
        null="no rank holds the others up, or waits are not known",
        tracker="straggler_rank",
    ),
    Metric(
        name="straggler_blame_ns",
        unit="ns",
        better="lower",
        definition="Time that the other ranks wait a step for that rank, summed over them.",
        section="Stragglers",
        clock="device",
        value=partial(_of_worst_straggler, "blame_ns_per_step"),
        null="no rank holds the others up, or waits are not known",
        tracker="straggler_blame_ms",
    ),
    Metric(
        name="predicted_gain",
        unit="fraction",
        better="neither",
        definition="Share of the step that goes with the change that is predicted to gain most, of those that the user "
        "of the job can make.",
        note="Replayed over a few steps; the interval beside it says how far that can be trusted.",
        section="Advice",
        clock="device",
        value=partial(_of_advice, "gain"),
        null="no change gains beyond noise, or the run cannot be replayed; advice.reason says why",
        json="advice.gain",
    ),
    Metric(
        name="replay_error",
        unit="fraction",
        better="lower",
        definition="How far the replay of the unchanged steps is off their measured time.",
        note="Above 5 % nothing is predicted.",
        section="Advice",
        clock="device",
        value=partial(_of_advice, "replay_error"),
        null="the run was not replayed; advice.reason says why",
        json="advice.replay_error",
    ),
    Metric(
        name="clock_error_ns",
        unit="ns",
        better="lower",
        definition="How far the clocks of two hosts may be apart after alignment; 0 on one host.",
        note="Two events closer than this are not ordered. Times of devices add twice the error of their own marks.",
        section="Clock error",
        clock="host",
        value=attrgetter("clock_error_ns"),
        null="clocks of several hosts are not aligned",
        json="clock_error_ns",
        tooltips={"key_figures": "clock_error"},
    ),
    Metric(
        name="device_error_ns",
        unit="ns",
        better="lower",
        definition="How far times of a device may be off on the clock of its host, at most.",
        section="Time on devices",
        value=attrgetter("device.error_ns"),
        null="no device was followed",
        json="device.error_ns",
        clock="host",
    ),
    Metric(
        name="share_of_step",
        unit="fraction",
        better="lower",
        definition="Time that dtprof spent recording, as a share of the step, mean over ranks.",
        section="Overhead",
        clock="host",
        value=attrgetter("overhead.share_of_step"),
        null="no steps, or a run that another tool recorded",
        json="overhead.share_of_step",
        tooltips={"key_figures": "overhead"},
        prometheus="overhead_ratio",
        tracker="overhead_share",
    ),
    Metric(
        name="capture_ns_total",
        unit="ns",
        better="lower",
        definition="Time that dtprof spent inside the ranks, summed over them.",
        section="Overhead",
        clock="host",
        value=attrgetter("overhead.capture_ns_total"),
        null="a run that another tool recorded",
        json="overhead.capture_ns_total",
        prometheus="capture_seconds",
    ),
    Metric(
        name="events",
        unit="count",
        definition="Records read: collectives, point-to-point operations, phases, memory samples.",
        note="Dropped: a log is bounded and keeps its beginning and its newest part.",
        section="Where the records come from",
        value=attrgetter("events"),
        json="events",
        tooltips={"key_figures": "events"},
        prometheus="events",
    ),
    Metric(
        name="dropped_events",
        unit="count",
        better="lower",
        definition="Records that gave way to newer ones to keep within --max-log-mb.",
        section="Where the records come from",
        value=attrgetter("dropped_events"),
        json="dropped_events",
        prometheus="dropped_events",
        tracker="dropped_events",
    ),
    Metric(
        name="world_size",
        unit="count",
        definition="Ranks of the job.",
        section="Where the records come from",
        value=attrgetter("world_size"),
        json="world_size",
        prometheus="ranks",
    ),
    Metric(
        name="steps",
        unit="count",
        definition="Steps that every rank has ended.",
        section="Steps",
        value=attrgetter("steps.count"),
        json="steps.count",
        prometheus="steps",
    ),
)
_PARTS = {
    "compute": "Forward and backward work, with everything below taken out.",
    "exposed_transfer": "The rank is blocked by an operation while all ranks have arrived: data moves.",
    "exposed_wait": "The rank is blocked by an operation in which a rank has not arrived yet.",
    "bubble": "A pipeline stage has no microbatch to work on; 0 where no pipeline runs.",
    "data": "The loop waits for the next batch.",
    "checkpoint": "A checkpoint is written or read.",
    "optimizer": "The optimizer's own work.",
    "host": "Work of the host outside every known phase: logging, evaluation, the rest of the loop.",
    "idle": "Neither host nor device does anything; known of a device, else 0 and its time is in host.",
}
RANK: tuple[Metric[RankResult], ...] = (
    Metric(
        name="step_ns",
        unit="ns",
        better="lower",
        definition="Mean duration of a measured step of the rank.",
        section="Steps",
        clock="device",
        value=attrgetter("step_ns"),
        null=NO_STEPS,
        json="ranks[].step_ns",
        compared=1,
        prometheus="rank_step_seconds",
    ),
    *(
        Metric(
            name=f"{part}_ns",
            unit="ns",
            better="neither" if part in ("compute", "optimizer") else "lower",
            definition=_PARTS[part],
            section="Partition",
            clock="device",
            value=partial(_part, part),
            null=NO_PARTITION if part != "bubble" else "the times of its pipeline are unknown",
            json=f"ranks[].partition_ns.{part}",
            tooltips={"step_parts": part},
            compared=4,
        )
        for part in PARTS
    ),
    Metric(
        name="exposed_ns",
        unit="ns",
        better="lower",
        definition="Exposed transfer and exposed wait together.",
        section="Exposed time",
        clock="device",
        value=lambda rank: exposed_of(rank.partition_ns),
        null=NO_PARTITION,
        compared=5,
        is_column=False,
    ),
    Metric(
        name="peak_bytes",
        unit="bytes",
        better="lower",
        definition="Highest memory of the rank.",
        section="Memory",
        value=attrgetter("peak_bytes"),
        null="not sampled",
        json="ranks[].memory.peak_bytes",
        compared=12,
        prometheus="rank_peak_memory_bytes",
    ),
    *(
        Metric(
            name=name,
            unit="bytes",
            better="lower",
            definition=definition,
            section="Memory",
            value=partial(_largest, name),
            null="not sampled",
            compared=7,
            is_column=False,
        )
        for name, definition in (
            (RSS_BYTES, "Largest resident memory of the process."),
            (CUDA_ALLOCATED_BYTES, "Most that torch had allocated on the GPU."),
            (CUDA_RESERVED_BYTES, "Most that torch's allocator had reserved on the GPU."),
        )
    ),
    Metric(
        name="host_lead_ns",
        unit="ns",
        definition="From the moment at which the host makes a mark until its device reaches it, median over the marks.",
        section="Time on devices",
        clock="device",
        value=attrgetter("host_lead_ns"),
        null="no device was followed",
        json="ranks[].host_lead_ns",
        is_column=False,
    ),
    Metric(
        name="events",
        unit="count",
        definition="Records of the rank.",
        section="Where the records come from",
        value=attrgetter("events"),
        json="ranks[].events",
    ),
)


def _of_operations(name: str, **declared: Any) -> Metric[CollectiveResult]:
    return Metric(name=name, value=attrgetter(name), json=f"collectives[].{name}", **declared)


COLLECTIVE: tuple[Metric[CollectiveResult], ...] = (
    _of_operations(
        "count",
        unit="count",
        definition="Operations, each counted once however many ranks take part.",
        section="Collectives",
        tooltips={"collectives": "count"},
        compared=11,
        prometheus="operations",
    ),
    _of_operations(
        "bytes",
        unit="bytes",
        definition="Bytes that one rank puts into one operation, mean.",
        section="Collectives",
        null=SIZES_UNKNOWN,
        tooltips={"collectives": "bytes"},
        compared=10,
        prometheus="operation_bytes",
    ),
    _of_operations(
        "duration_ns",
        unit="ns",
        better="lower",
        definition="From issue to completion, mean per operation and rank.",
        section="Wait and transfer",
        clock="device",
        null="completion is not observed",
        tooltips={"collectives": "duration"},
        prometheus="operation_seconds",
    ),
    _of_operations(
        "wait_ns",
        unit="ns",
        better="lower",
        definition="From the arrival of a rank to that of the last one, mean per operation and rank.",
        section="Wait and transfer",
        clock="device",
        null=NO_WAITS,
        tooltips={"collectives": "wait", "exposed_by_axis": "wait"},
        compared=8,
        prometheus="operation_wait_seconds",
    ),
    _of_operations(
        "transfer_ns",
        unit="ns",
        better="lower",
        definition="From the arrival of the last rank to completion, mean per operation and rank.",
        section="Wait and transfer",
        clock="device",
        null=NO_WAITS,
        tooltips={"collectives": "transfer", "exposed_by_axis": "transfer"},
        compared=9,
    ),
    _of_operations(
        "exposed_ns",
        unit="ns",
        better="lower",
        definition="Time in which a rank does nothing else because of the operation, mean per operation and rank.",
        note="Blocked until the wait returns, so it can exceed the duration, which ends at completion.",
        section="Exposed time",
        clock="device",
        null="completion is not observed",
        tooltips={"collectives": "exposed", "exposed_by_axis": "exposed"},
        compared=5,
        prometheus="operation_exposed_seconds",
    ),
    _of_operations(
        "overlap",
        unit="fraction",
        better="higher",
        definition="1 - exposed / in flight: the share of it that other work hides.",
        section="Overlap",
        clock="device",
        null="completion is not observed",
        tooltips={"collectives": "overlap"},
    ),
    _of_operations(
        "busbw_gb_per_s",
        unit="GB/s",
        better="higher",
        definition="Bus bandwidth as nccl-tests define it: bytes over transfer time, times a factor of the operation.",
        note="The factor is 2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter, all_gather and all_to_all, 1 for the "
        "others. Comparable with the speed of the link.",
        section="Bus bandwidth",
        clock="device",
        null=NO_BANDWIDTH,
        tooltips={"collectives": "busbw", "bandwidth": "bus_bandwidth"},
        prometheus="operation_bus_bytes_per_second",
    ),
    _of_operations(
        "algbw_gb_per_s",
        unit="GB/s",
        better="higher",
        definition="Algorithm bandwidth as nccl-tests define it: bytes over transfer time.",
        section="Bus bandwidth",
        clock="device",
        null=NO_BANDWIDTH,
        tooltips={"collectives": "algbw"},
    ),
)


def _per_step(json: str, name: str, **declared: Any) -> Metric[Any]:
    return Metric(name=name, value=attrgetter(name), json=f"{json}[].{name}", **declared)


def _of_communication(json: str, whose: str, *names: str) -> tuple[Metric[Any], ...]:
    """Return figures of a step's operations, mean over the ranks of the job."""
    kinds = {
        "count_per_step": ("per step", "neither", "Operations of a rank {}.", "", "", "operations"),
        "bytes": (
            "bytes",
            "neither",
            "Bytes that one rank puts into one of the operations {}, mean.",
            "",
            SIZES_UNKNOWN,
            "bytes",
        ),
        "bytes_per_step": (
            "bytes",
            "neither",
            "Bytes that a rank puts into operations {}.",
            "",
            SIZES_UNKNOWN,
            "bytes",
        ),
        "exposed_ns_per_step": (
            "ns",
            "lower",
            "Time of a step in which a rank does nothing else because of operations {}.",
            "device",
            "completion is not observed",
            "exposed",
        ),
        "wait_ns_per_step": (
            "ns",
            "lower",
            "Time of a step from the arrival of a rank to that of the last one, in operations {}.",
            "device",
            NO_WAITS,
            "wait",
        ),
        "transfer_ns_per_step": (
            "ns",
            "lower",
            "Time of a step from the arrival of the last rank to completion, in operations {}.",
            "device",
            NO_WAITS,
            "transfer",
        ),
        "algbw_gb_per_s": (
            "GB/s",
            "higher",
            "Algorithm bandwidth, bytes over transfer time, of operations {}.",
            "device",
            NO_BANDWIDTH,
            "algbw",
        ),
        "busbw_gb_per_s": ("GB/s", "higher", "Bus bandwidth of operations {}.", "device", NO_BANDWIDTH, "busbw"),
    }
    return tuple(
        _per_step(
            json,
            name,
            unit=unit,
            better=better,
            definition=said.format(whose),
            section="Call sites, phases and sizes",
            clock=clock,
            null=null,
            tooltips={json: tooltip},
        )
        for name in names
        for unit, better, said, clock, null, tooltip in (kinds[name],)
    )


PIPELINE_ACTION: tuple[Metric[PipelineAction], ...] = tuple(
    _per_step(
        "pipeline.per_action",
        name,
        unit="ns",
        better="lower",
        definition=definition,
        section="Pipeline bubble",
        clock="device",
        null=null,
        tooltips={"pipeline_actions": name, "pipeline_stages": name},
    )
    for name, definition, null in (
        ("forward_ns", "Forward of the microbatch on the stage, in a step, mean over replicas.", NO_ACTION),
        ("backward_ns", "Its backward, with the gradients of weights where they are not apart.", NO_ACTION),
        ("weight_ns", "Gradients of its weights alone; 0 where they are not apart.", NO_ACTION),
        ("bubble_ns", "Time in which the rank of the stage waits to begin one of these actions.", ""),
    )
)
PIPELINE_STEP: tuple[Metric[PipelineStep], ...] = (
    _per_step(
        "pipeline.per_step",
        "window_ns",
        unit="ns",
        better="lower",
        definition="From the first forward of any stage to the end of the last backward, in one step.",
        section="Pipeline bubble",
        clock="device",
    ),
    _per_step(
        "pipeline.per_step",
        "bubble_fraction",
        unit="fraction",
        better="lower",
        definition="Share of the window of one step in which stages do not compute.",
        section="Pipeline bubble",
        clock="device",
    ),
)
LATENESS: tuple[Metric[GroupLateness], ...] = (
    _per_step(
        "lateness",
        "count",
        unit="count",
        definition="Operations of the group that all members recorded on one clock, over the whole run.",
        section="Lateness",
    ),
    *(
        _per_step(
            "lateness",
            f"{name}_ns",
            unit="ns",
            better="lower",
            definition=f"From the first arrival to the last at an operation of the group: {words} over operations.",
            section="Lateness",
            clock="device",
        )
        for name, words in (
            ("p10", "tenth percentile"),
            ("median", "median"),
            ("p90", "ninetieth percentile"),
            ("p99", "ninety-ninth percentile"),
        )
    ),
    _per_step(
        "lateness",
        "last_share",
        unit="fraction",
        definition="Share of the operations at which the rank that is last most often arrives last, by over 1 us.",
        section="Lateness",
        clock="device",
        null="all arrive together",
    ),
)
PART_BAND: tuple[Metric[PartBand], ...] = tuple(
    Metric(
        name=f"{over}_{percentile}_ns",
        unit="ns",
        definition=f"{words} over {over} of the part{whose}.",
        section="Partition",
        clock="device",
        value=attrgetter(f"over_{over}.{percentile}"),
        json=f"part_bands[].over_{over}.{percentile}",
        tooltips={"part_bands": f"{over}_{percentile}"},
    )
    for over, whose in (("ranks", " in the mean step of each rank"), ("steps", " in each step, mean over ranks"))
    for percentile, words in (("p10", "Tenth percentile"), ("median", "Median"), ("p90", "Ninetieth percentile"))
)
STRAGGLER: tuple[Metric[StragglerResult], ...] = (
    Metric(
        name="last_share",
        unit="fraction",
        better="lower",
        definition="Of the steps with notable waits, the share in which this rank has the most blame.",
        note="With no straggler, every one of n ranks has about 1/n.",
        section="Stragglers",
        clock="device",
        value=attrgetter("last_share"),
        json="stragglers[].last_share",
        tooltips={"stragglers": "arrives_last"},
    ),
    Metric(
        name="slowdown",
        unit="ratio",
        better="lower",
        definition="Measured step over the step as it would be with this rank like the others.",
        section="Stragglers",
        clock="device",
        value=attrgetter("slowdown"),
        null="not known",
        json="stragglers[].slowdown",
        tooltips={"stragglers": "slowdown"},
    ),
    Metric(
        name="blame_ns_per_step",
        unit="ns",
        better="lower",
        definition="Time that the other ranks wait for this one a step, summed over them.",
        note="One rank's lateness is paid by all others, so this can exceed the step.",
        section="Stragglers",
        clock="device",
        value=attrgetter("blame_ns_per_step"),
        null="not known",
        json="stragglers[].blame_ns_per_step",
        tooltips={"stragglers": "costs_others", "rank_grid": "cost_to_others"},
        prometheus="straggler_seconds",
    ),
    Metric(
        name="lag_ns_per_step",
        unit="ns",
        better="lower",
        definition="By how much a step would be shorter with this rank like the others.",
        section="Stragglers",
        clock="device",
        value=attrgetter("lag_ns_per_step"),
        null="not known",
        json="stragglers[].lag_ns_per_step",
    ),
)
CALL_SITE: tuple[Metric[CallSiteResult], ...] = _of_communication(
    "call_sites",
    "that the line issues in this phase",
    *("count_per_step", "bytes", "exposed_ns_per_step", "wait_ns_per_step", "transfer_ns_per_step"),
)
PHASE: tuple[Metric[PhaseCommunication], ...] = _of_communication(
    "communication_phases",
    "issued in the phase",
    *("count_per_step", "bytes_per_step", "exposed_ns_per_step", "wait_ns_per_step", "transfer_ns_per_step"),
)
SIZES: tuple[Metric[MessageSizes], ...] = _of_communication(
    "message_sizes",
    "of this size class",
    *("count_per_step", "bytes_per_step", "exposed_ns_per_step", "transfer_ns_per_step"),
    *("algbw_gb_per_s", "busbw_gb_per_s"),
)
KINDS: Mapping[str, tuple[Metric[Any], ...]] = {
    "job": JOB,
    "rank": RANK,
    "collective": COLLECTIVE,
    "call_site": CALL_SITE,
    "communication_phase": PHASE,
    "message_sizes": SIZES,
    "part_band": PART_BAND,
    "pipeline_action": PIPELINE_ACTION,
    "pipeline_step": PIPELINE_STEP,
    "lateness": LATENESS,
    "straggler": STRAGGLER,
}
METRICS = tuple(metric for metrics in KINDS.values() for metric in metrics)
COMPARED = tuple(dict.fromkeys(m.name for m in sorted(METRICS, key=lambda m: m.compared) if m.compared))
"""Names of the figures that `dtprof compare` shows, in their order."""
OF_JOB = {metric.name: metric for metric in JOB}
"""Figures of the job, by name."""


def unit_of(name: str) -> str:
    """Return the unit of a figure; one name has one unit whatever it is of."""
    return next(metric.unit for metric in METRICS if metric.name == name)


def tooltips_of(panel: str) -> dict[str, str]:
    """Return the definitions of the figures in a panel, by the names the panel uses."""
    return {name: metric.tooltip for metric in METRICS if (name := metric.tooltips.get(panel)) is not None}
