"""Results of the analysis of a run: frozen, and the same for text, JSON, figures and the Python API.

Names, units and meaning follow docs/reference/metrics.md. `None` stands for "not known"; the reason is among
`Summary.cannot_tell`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtprof.analysis.rank_exits import RankEnd
from dtprof.job.clock_alignment import ClockResult
from dtprof.records import events
from dtprof.records.nodes.sampled_lines import HotLine, LateLine
from dtprof.records.profiler_windows import Share
from dtprof.records.sites import Site
from dtprof.records.tables import OutOfMemory

PARTS = (
    "compute",
    "exposed_transfer",
    "exposed_wait",
    "bubble",
    "data",
    "checkpoint",
    "optimizer",
    "host",
    "idle",
)
"""The exact partition of a step, in the order in which it is drawn."""
EXPOSED_PARTS = ("exposed_transfer", "exposed_wait")
MOST_GAIN = 0.999
"""Of a step, that a rank is said to cost at most."""
IDLE = "idle"
"""The part that every run without recorded devices has a caveat about."""
BUBBLE = "bubble"
"""The part that may be unknown where the others are known; its time is in exposed_wait, host or idle then."""
PHASES = (*events.PHASES, "other")
"""The second, independent partition of a step."""


DEVICE, HOST = "device", "host"
"""Whose times the figures of a rank are in: never both, but of operations on CPU tensors, which have the host's."""


class Caveat(str):
    """Why a figure of a run is approximate or missing: the sentence, and its parts."""

    subject: str  # the figure; empty: none
    reason: str
    is_usual: bool  # most runs have it, so that text output leaves it out

    def __new__(cls, subject: str, reason: str, is_usual: bool = False) -> "Caveat":
        """Return the sentence, subject first."""
        caveat = super().__new__(cls, f"{subject}: {reason}" if subject else reason)
        caveat.subject, caveat.reason, caveat.is_usual = subject, reason, is_usual
        return caveat

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the parts where it is sent to another process."""
        return Caveat, (self.subject, self.reason, self.is_usual)

    @staticmethod
    def parse(text: str) -> "Caveat":
        """Return the caveat that an importer stored."""
        subject, colon, reason = text.partition(": ")
        return Caveat(subject, reason, is_usual=subject == IDLE) if colon else Caveat("", text)


def phase_words(phase: str) -> str:
    """Say for people in which phase something is; one of PHASES."""
    return "outside all phases" if phase == "other" else f"in {phase.replace('_', ' ')}"


def exposed_of(parts: Mapping[str, float | None] | None) -> float | None:
    """Return the exposed communication among the parts of a step, be they times or shares; None where not known."""
    known = [own for part in EXPOSED_PARTS if (own := (parts or {}).get(part)) is not None]
    return sum(known) if len(known) == len(EXPOSED_PARTS) else None


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """The ranks whose steps, phases and operations are in the time of their device; none where none was followed."""

    ranks: tuple[int, ...] = ()
    error_ns: int | None = None  # by which these may be off on the clock of the host, at most
    host_lead_ns: int | None = None  # of the hosts ahead of their devices, median over the ranks


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and tenth and ninetieth percentile of a quantity."""

    median: int
    p10: int
    p90: int


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """The cost of recording."""

    capture_ns_per_event: int | None
    capture_ns_total: int | None  # None: another tool recorded
    share_of_step: float | None


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """One process group of the job, members as global ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]
    axis: str | None


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps counted on every rank; `used` is the first and the last one that figures are taken from (1-based)."""

    count: int
    used: tuple[int, int] | None
    duration_ns: Spread | None


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The tokens and samples that the whole job consumes; medians over the measured steps."""

    tokens_per_s: float | None
    samples_per_s: float | None
    tokens_per_step: float | None
    samples_per_step: float | None
    mean_tokens_per_s: float | None  # all that the measured steps consumed over their time, as frameworks print it
    mean_samples_per_s: float | None
    first_step: int  # the number of the first of these
    tokens_per_s_of_steps: tuple[float, ...]  # of each measured step; empty where not known
    samples_per_s_of_steps: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """The trend of a rank's memory over the steps."""

    sample: str  # that tells, such as heap_bytes
    bytes_per_step: float
    low_bytes_per_step: float  # with 99.9 % confidence
    high_bytes_per_step: float
    leaks: bool | None  # it grows notably and goes on growing; None: too few samples


@dataclass(frozen=True, kw_only=True)
class MemoryFormula:
    """The model state and activations of a rank, measured and by formula."""

    scheme: str  # "none", "zero1", "zero2", "zero3": how the model's state is spread
    shards: int  # data-parallel ranks that it is, or could be, spread over
    state_bytes: int | None  # parameters, gradients, optimizer state; None where one of them is not known
    state_formula_bytes: int
    by_scheme_bytes: dict[str, int]  # the formula of each scheme
    activation_bytes: int | None
    activation_formula_bytes: int | None  # None: the records do not tell the sizes of the layers


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """An assumption of the formulas, and whether it holds in this run; None: the records do not show it."""

    text: str
    holds: bool | None


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """The free part of a memory at its peak."""

    host: str
    device: str  # "host", "container": what the job may use of it, "gpu 0"
    capacity_bytes: int
    most_used_bytes: int  # by anybody
    headroom_bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """A GPU over the run by NVML's samples; None: not sampled, or not known of this device."""

    host: str
    device: str  # "gpu 0", by NVML's index
    name: str | None
    ranks: tuple[int, ...]  # that compute on it
    utilisation: float | None  # mean share of time in which some kernel ran
    sm_clock_mhz: float | None  # median while it was busy
    held_down: Mapping[str, float] | None  # what held its clock down: share of the samples while it was busy
    power_w: float | None  # mean
    temperature_c: float | None  # most
    nvlink_bytes_per_s: float | None  # sent over all NVLinks
    ecc_corrected: int | None  # in the run, as the next ones
    ecc_uncorrected: int | None
    xid_errors: int | None
    last_xid: int | None
    lost: bool | None  # the driver no longer reaches it


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank, averaged over the measured steps; the parts sum to the step."""

    rank: int
    step_ns: int | None
    partition_ns: Mapping[str, int | None] | None  # by PARTS; the bubble is None where it is not known
    phases_ns: dict[str, int] | None  # by PHASES
    peak_bytes: int | None
    memory_categories: dict[str, int | None]  # by rank_memory.CATEGORIES; empty where none was recorded
    events: int
    ended: RankEnd
    user_phases_ns: dict[str, int] | None = None  # by the names the program gave; they may overlap
    memory_bytes: dict[str, int] = field(default_factory=dict)  # the largest value of each sample
    fragmentation: float | None = None  # 1 - allocated / reserved on the device, both at their peaks
    out_of_memory: tuple[OutOfMemory, ...] = ()
    memory_growth: MemoryGrowth | None = None  # None: too few samples
    memory_formula: MemoryFormula | None = None  # None: what memory is held for was not recorded
    clock: str | None = HOST  # whose times those of this rank are: DEVICE or HOST; None: those that another tool took
    host_lead_ns: int | None = None  # by which the host is ahead of its device, median; None: no device was followed
    partition_error_ns: int | None = None  # by which clocks may be off in exposed_wait, exposed_transfer and bubble
    waited_for_ns: dict[int, int] | None = None  # a step, exposed, by who came last; None: not known, or too many pairs

    @property
    def exposed_share(self) -> float | None:
        """The share of the step in exposed communication."""
        exposed_ns = exposed_of(self.partition_ns)
        return exposed_ns / self.step_ns if exposed_ns is not None and self.step_ns else None


@dataclass(frozen=True, kw_only=True)
class PartBand:
    """How far one part of the step varies over ranks and over steps."""

    part: str  # one of PARTS
    over_ranks: Spread  # of the mean step of each rank
    over_steps: Spread  # of the mean over ranks of each step


@dataclass(frozen=True, kw_only=True)
class GroupLateness:
    """The time from the first arrival to the last at the operations of one group, over the whole run."""

    group: str
    count: int  # operations that all members recorded on one clock
    p10_ns: int
    median_ns: int
    p90_ns: int
    p99_ns: int
    last_rank: int | None  # that arrives last most often; None: all arrive together
    last_share: float | None  # of the operations


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """One operation of one group and api over the measured steps (the whole run where there are none).

    Durations are means per operation and rank; bytes are those one rank puts into one operation, averaged.
    """

    group: str
    op: str
    api: str | None
    count: int  # operations, each counted once however many ranks took part
    bytes: int | None  # None: the records do not tell sizes
    duration_ns: int | None
    wait_ns: int | None
    transfer_ns: int | None
    exposed_ns: int | None
    overlap: float | None
    busbw_gb_per_s: float | None
    algbw_gb_per_s: float | None = None
    dropped_records: int = 0  # of all ranks; they are in count and bytes, from anywhere in the run, and in nothing else
    axis: str | None = None  # that it serves, else the description of its group; None: neither is known

    @property
    def in_flight_ns(self) -> int:
        """The time in flight of all operations on a rank; 0 where it is not known."""
        return (self.duration_ns or 0) * self.count


@dataclass(frozen=True, kw_only=True)
class CallLine:
    """A line of the program."""

    file: str
    line: int
    function: str
    caller: "CallLine | None" = None  # that called the function; None: not known, or a module

    @property
    def short(self) -> str:
        """Return the name of the file and the line."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"

    @property
    def place(self) -> str:
        """Return it as tables have it: the name of the file, the line, the function."""
        return f"{self.short} in {self.function}"

    @property
    def words(self) -> str:
        """Return it as text has it, with its caller."""
        return f"{self.place}, called at {self.caller.place}" if self.caller is not None else self.place

    @classmethod
    def of(cls, site: Site | None) -> "CallLine | None":
        """Return the line of a site; None where it is not known."""
        if site is None or not site.file:
            return None
        return cls(file=site.file, line=site.line, function=site.function, caller=cls.of(site.caller))


@dataclass(frozen=True, kw_only=True)
class CallSiteResult:
    """Operations that one line of the program issues in one phase, along one axis; means over all ranks and steps."""

    line: CallLine | None  # None: no line of the program is known
    phase: str  # in which it issues them; one of PHASES
    axis: str  # or the description of the group, or its name
    op: str
    api: str | None
    count_per_step: float  # operations of a rank
    bytes: int | None  # that one rank puts into one operation
    exposed_ns_per_step: int | None
    wait_ns_per_step: int | None
    transfer_ns_per_step: int | None

    @property
    def operation(self) -> str:
        """Return for people the operation, with the component that issues it where that says more."""
        return f"{self.op} ({self.api})" if self.api and self.api not in self.op else self.op


@dataclass(frozen=True, kw_only=True)
class PhaseCommunication:
    """Communication that ranks issue in one phase of the step; means over all ranks and steps."""

    phase: str  # one of PHASES
    count_per_step: float
    bytes_per_step: int | None
    exposed_ns_per_step: int | None
    wait_ns_per_step: int | None
    transfer_ns_per_step: int | None


@dataclass(frozen=True, kw_only=True)
class MessageSizes:
    """Operations of one size class: from a power of two to below the next; means over all ranks and steps."""

    axis: str  # or the description of the group, or its name
    ranks: int  # of the group
    op: str
    from_bytes: int  # that one rank puts into one operation
    below_bytes: int
    count_per_step: float
    bytes_per_step: int
    exposed_ns_per_step: int | None
    transfer_ns_per_step: int | None
    algbw_gb_per_s: float | None
    busbw_gb_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A restart of the job or of one of its replicas."""

    replica: int | None  # from 0; None: the job has no replicas
    ranks: tuple[int, ...]
    lost_ns: int | None  # from the last record before to the end of the first step after; None: not known


@dataclass(frozen=True, kw_only=True)
class SmallMessages:
    """Operations so small and so many that joining them would save time; of several groups of an axis the worst."""

    axis: str  # or the description of the group, or its name
    op: str
    api: str | None
    groups: int  # of the axis in which it is so
    count_per_step: float
    bytes: int  # each, mean
    exposed_ns_per_step: int  # of each rank
    line: CallLine | None = None  # of the program, that issues those which cost most; None: not known


@dataclass(frozen=True, kw_only=True)
class UnevenInput:
    """Input that differs between the ranks of a step, and their work with it."""

    quantity: str  # "tokens" or "samples"
    mean_per_step: float  # of a rank
    largest_over_mean: float  # of the ranks of a step, mean over the steps
    explained: float  # share of the variance of work between the ranks of a step
    gain_ns_per_step: int  # at least, with batches of equal size; of many ranks and steps more, as bins even it out


@dataclass(frozen=True, kw_only=True)
class RepeatedReductions:
    """Gradients that DDP reduces after each of several backward passes of a step; of groups of an axis the worst."""

    axis: str  # or the description of the group, or its name
    reductions_per_step: int  # of each gradient
    bytes_per_step: int  # of a rank, in all of them
    exposed_ns_per_step: int  # in which they block a rank
    gain_ns_per_step: int  # of this, all but the last of these reductions
    line: CallLine | None = None  # of the backward pass that costs most; None: not known


@dataclass(frozen=True, kw_only=True)
class SerialisedCollectives:
    """Collectives waited for one by one with nothing computed between; of several groups of an axis the worst."""

    axis: str  # or the description of the group, or its name
    op: str
    api: str | None
    groups: int  # of the axis in which it is so
    rows_per_step: float  # of collectives that follow one another
    count_per_step: float  # collectives in them
    bytes: int  # each, mean
    exposed_ns_per_step: int  # transfers in them that blocked a rank
    gain_ns_per_step: int  # at most, were those of each row under way together
    line: CallLine | None = None  # of the program, that issues those with the largest gain; None: not known


@dataclass(frozen=True, kw_only=True)
class ExchangeMember:
    """A member of a group with uneven exchanges; its own part counts as sent and received."""

    rank: int
    sent_bytes_per_step: int
    received_bytes_per_step: int
    load: float  # bytes on the more uneven side of each exchange, over the mean of the members


@dataclass(frozen=True, kw_only=True)
class ExchangeBalance:
    """How evenly the members of a group share its all_to_all: of experts, the tokens that each rank's were given."""

    group: str
    axis: str | None
    count: int  # exchanges compared: those that all members recorded, the newest
    imbalance: float  # bytes of the busiest member of each exchange over the mean, on its more uneven side; 1: even
    busiest_rank: int  # that has most of these bytes
    busiest_share: float
    members: tuple[ExchangeMember, ...]


@dataclass(frozen=True, kw_only=True)
class Waiter:
    """A rank that waited for a straggler, itself or through others."""

    rank: int
    wait_ns: int  # a step


@dataclass(frozen=True, kw_only=True)
class StragglerResult:
    """A rank that the others waited for because its own work was long."""

    rank: int
    last_share: float  # of the steps with notable waits: those in which it has the most blame
    slowdown: float | None
    blame_ns_per_step: int | None
    lag_ns_per_step: int | None = None  # what a step would gain if it were like the others
    replayed_lag_ns_per_step: int | None = (
        None  # the same by a replay of steps without it; None: they were not replayed
    )
    replayed_lag_interval_ns_per_step: tuple[int, int] | None = None  # bounds of that
    together_ns_per_step: int | None = None  # the same if those listed before it were so, too
    slowdown_together: float | None = None
    since_step: int | None = None
    phase: str | None = None  # in which its work exceeds that of the others most; one of PHASES
    phases_ns: dict[str, int] = field(default_factory=dict)  # that excess by phase
    cause: str | None = None  # where the records tell
    sampled: LateLine | None = None  # where it was seen to spend more of its time, while the job ran
    waiters: tuple[Waiter, ...] = ()  # those who waited most

    @property
    def replayed_slowdown(self) -> tuple[float, float, float] | None:
        """The slowdown by the replay, and its bounds; None where there is no replay."""
        lag_ns, bounds = self.replayed_lag_ns_per_step, self.replayed_lag_interval_ns_per_step
        if lag_ns is None or bounds is None or not self.lag_ns_per_step or not self.slowdown:
            return None
        step_ns = self.lag_ns_per_step / (1 - 1 / self.slowdown)
        most_ns = MOST_GAIN * step_ns
        found, low, high = (step_ns / (step_ns - min(each, most_ns)) for each in (lag_ns, *bounds))
        return found, low, high

    @property
    def phase_words(self) -> str:
        """Say for people in which phase its work exceeds that of the others most; nothing where that is not known."""
        return "" if self.phase is None else phase_words(self.phase)


@dataclass(frozen=True, kw_only=True)
class PathOperation:
    """Transfers of one operation of one group on the critical path of a step."""

    op: str
    group: str
    transfer_ns: int


@dataclass(frozen=True, kw_only=True)
class PathRank:
    """Work of one rank on the critical path of a step."""

    rank: int
    work_ns: int


@dataclass(frozen=True, kw_only=True)
class CriticalPathResult:
    """The critical path of the step; work by phase and transfers sum to the step, rounded down."""

    steps: int  # that were looked at
    step_ns: int  # from the end of the last rank to the end of the last rank, mean
    phases_ns: dict[str, int]  # work, by phase; `communication` is time blocked by what nothing is known of
    transfer_ns: int
    operations: tuple[PathOperation, ...]  # the longest transfers
    ranks: tuple[PathRank, ...]  # those with most work on it


@dataclass(frozen=True, kw_only=True)
class TimelineBar:
    """One bar of the timeline."""

    rank: int
    lane: str  # "phases" or "communication"
    name: str  # phase, or operation
    kind: str  # phase name, or "exposed", "overlapped", "point to point"
    begin_ns: int  # since Timeline.origin_ns
    end_ns: int
    label: str  # what hovering shows, plain text, lines separated by \n


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A few steps of all ranks on one clock."""

    first_step: int
    last_step: int
    origin_ns: int
    end_ns: int
    intervals: tuple[TimelineBar, ...]
    left_out: int  # intervals that were too many to keep


@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """Duration of every step of one rank whose begin is known, warm-up included, in order."""

    rank: int
    duration_ns: tuple[int, ...]
    first_step: int = 2  # the number of the first of them: the first step of all has no begin
    numbers: tuple[int, ...] = ()  # of all of them; empty where they follow one another

    @property
    def steps(self) -> Sequence[int]:
        """Return the number of each of them."""
        return self.numbers or range(self.first_step, self.first_step + len(self.duration_ns))


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """One rank of a pipeline: the mean of its bubbles over the measured steps."""

    rank: int
    bubble_ns: int


@dataclass(frozen=True, kw_only=True)
class PipelineAction:
    """What one microbatch takes on one stage, and the bubble before it; means over replicas and steps."""

    stage: int
    microbatch: int | None  # None: after the last action of the rank
    forward_ns: int | None
    backward_ns: int | None  # with the gradients of weights where they are not apart
    weight_ns: int | None  # gradients of weights alone; 0: they are not apart
    bubble_ns: int  # in which the rank waited to begin one of these


@dataclass(frozen=True, kw_only=True)
class PipelineStage:
    """What a stage takes in a step, over all microbatches, and the bubbles before its actions; means over replicas."""

    stage: int
    forward_ns: int
    backward_ns: int
    weight_ns: int
    bubble_ns: int


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One step of the pipeline, mean over replicas."""

    step: int
    window_ns: int
    bubble_fraction: float


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """The bubbles of the job's pipeline, mean over replicas and measured steps."""

    schedule: str
    stages: int
    ranks: int  # of one pipeline
    microbatches: int
    bubble_fraction: float  # of the windows from the first forward to the last backward
    theory_fraction: float | None
    parts: dict[str, float] | None  # schedule, imbalance, exposed_p2p, jitter: they sum to bubble_fraction
    per_rank: tuple[PipelineRank, ...]
    by_time: dict[str, float] = field(default_factory=dict)  # warm_up, steady, drain: they sum to bubble_fraction, too
    advice: str | None = None  # what makes the largest part smaller
    per_action: tuple[PipelineAction, ...] = ()  # by stage and microbatch, of the steps whose actions are kept
    per_stage: tuple[PipelineStage, ...] = ()  # the same, summed over microbatches
    per_step: tuple[PipelineStep, ...] = ()  # of all measured steps
    inferred: bool = False  # stages, microbatches and schedule follow from messages and passes: no framework names them


@dataclass(frozen=True, kw_only=True)
class WindowSummary:
    """The newest profiler window of a rank, by kernels; kernel figures are None where it has none."""

    rank: int
    first: int  # step
    last: int
    top_of: str  # "kernels", "operators of the host"
    communication_ns: int | None  # in which a kernel that communicates runs
    exposed_ns: int | None  # of it while no other kernel runs
    overlap: float | None  # 1 - exposed / communication
    compute_ns: int | None  # in which any other kernel runs
    top: tuple[Share, ...]  # the most time of their own first


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The change with the largest predicted gain that the user of the job can make, by replay of a few steps.

    Of a change, all but `reason` is known; else `reason` says why none is named.
    """

    fix: tuple[str, ...] = ()  # as `dtprof whatif` takes it
    change: str = ""  # in words
    step_ns: float | None = None  # predicted
    gain: float | None = None  # share of the replayed step that goes
    interval: tuple[float, float] | None = None  # of the gain, 95 %
    is_bound: bool = False  # the gain is what the change can bring at most
    assumes: str = ""
    replay_error: float | None = None  # None: nothing was replayed
    replayed_steps: tuple[int, int] | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that `dtprof summary` and `dtprof report` show; its JSON document has these fields in this order."""

    run: str
    command: tuple[str, ...]
    world_size: int
    hosts: tuple[str, ...]
    backend: str | None
    torch: str | None
    hook: str | None  # "native", "python", "mixed"
    complete: bool
    missing_ranks: tuple[int, ...]  # of the last attempt
    left_out_ranks: tuple[int, ...] = ()  # that took part in an earlier attempt only
    events: int
    dropped_events: int
    clock_error_ns: int | None
    wall_ns: int | None  # first to last event
    clocks: tuple[ClockResult, ...] = ()  # of the hosts, where there are several
    device: DeviceTimes = field(default_factory=DeviceTimes)
    overhead: Overhead
    groups: tuple[GroupResult, ...]
    steps: Steps
    step_series: tuple[StepSeries, ...]
    throughput: Throughput | None = None  # None: not known
    ranks: tuple[RankResult, ...]
    collectives: tuple[CollectiveResult, ...]
    part_bands: tuple[PartBand, ...] = ()  # by PARTS; empty where no step could be split
    lateness: tuple[GroupLateness, ...] = ()  # the latest first
    call_sites: tuple[CallSiteResult, ...] = ()  # costliest first; empty without measured steps, as the next two
    communication_phases: tuple[PhaseCommunication, ...] = ()
    message_sizes: tuple[MessageSizes, ...] = ()
    small_messages: tuple[SmallMessages, ...] = ()
    repeated_reductions: tuple[RepeatedReductions, ...] = ()
    serialised: tuple[SerialisedCollectives, ...] = ()
    exchanges: tuple[ExchangeBalance, ...] = ()  # of groups whose splits are uneven, the most uneven first
    pipeline: PipelineResult | None = None
    stragglers: tuple[StragglerResult, ...] | None  # None: none was found, but not every rank could be judged
    uneven_input: tuple[UnevenInput, ...] = ()  # by quantity; empty: even, or work does not follow it
    hot_lines: tuple[HotLine, ...] = ()  # costliest first; empty where no rank was sampled, or none takes much
    timeline: Timeline | None
    headroom: tuple[Headroom, ...] = ()  # scarcest first; empty where the nodes were not sampled
    gpus: tuple[GpuUse, ...] = ()  # empty where no rank computes on a device, or none was sampled
    memory_assumptions: tuple[Assumption, ...] = ()  # of the formulas of the ranks
    critical_path: CriticalPathResult | None = None
    windows: tuple[WindowSummary, ...] = ()  # of torch.profiler, one a rank; read beside the records
    advice: Advice | None = None  # None: not asked for
    replicas: int = 1  # groups of ranks that ran under the same numbers
    recoveries: tuple[Recovery, ...] = ()  # restarts, in the order of time
    cannot_tell: tuple[Caveat, ...]

    def reasons(self, figure: str) -> list[str]:
        """Return why a figure is approximate or missing."""
        return [caveat.reason for caveat in self.cannot_tell if caveat.subject == figure]

    @property
    def time_error_ns(self) -> int | None:
        """Return how far the times of two ranks may be apart: by the clocks of their hosts and of their devices."""
        if self.clock_error_ns is None or self.device.error_ns is None:
            return self.clock_error_ns
        return self.clock_error_ns + 2 * self.device.error_ns

    @property
    def part_shares(self) -> dict[str, float | None] | None:
        """Return the share of each part in the steps of all ranks whose steps could be split; None without any.

        A part that is not known on one of these ranks is not known of all.
        """
        split = [(rank.partition_ns, rank.step_ns) for rank in self.ranks if rank.partition_ns and rank.step_ns]
        total = sum(step_ns for _, step_ns in split)
        if not total:
            return None
        columns = {part: [partition[part] for partition, _ in split] for part in PARTS}
        return {part: None if None in column else sum(filter(None, column)) / total for part, column in columns.items()}

    @property
    def exposed_share(self) -> float | None:
        """The share of the steps of all ranks in exposed communication."""
        return exposed_of(self.part_shares)

    @property
    def worst_straggler(self) -> StragglerResult | None:
        """The straggler that costs the others most; None: there is none, or that is not known."""
        return self.stragglers[0] if self.stragglers else None

    @property
    def straggler_slowdown(self) -> float | None:
        """The slowdown by all stragglers together, or by the only one."""
        if not self.stragglers:
            return None
        last = self.stragglers[-1]
        return last.slowdown if len(self.stragglers) == 1 else last.slowdown_together

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """Return the ranks that left no log in any attempt."""
        return tuple(rank for rank in self.missing_ranks if rank not in self.left_out_ranks)
