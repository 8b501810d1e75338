"""A log directory for TensorBoard: scalars of each rank and of all, spreads, texts, the layout, and traces.

Times are in ms and sizes in bytes; each point lies at the number of its step. `all ranks` holds medians over ranks,
what the slowest and the fastest took, the spread of steps over ranks, what the job consumes a second, texts, pictures,
and the layout as hyperparameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from dtprof.analysis.metric_registry import RANK
from dtprof.analysis.results import EXPOSED_PARTS, PARTS
from dtprof.analysis.steps.throughput import measure_throughput
from dtprof.analysis.timeline.operation_detail import (
    RankDetail,
    RunDetail,
    map_ranges,
    map_ranks,
    read_chosen,
    read_ranks,
)
from dtprof.columns import known_medians
from dtprof.formatting import format_count
from dtprof.interchange.exporters.exported_steps import choose_window
from dtprof.interchange.exporters.kineto_export import RankTrace, trace_collector, write_traces
from dtprof.interchange.exporters.tensorboard_events import EventFile, Picture
from dtprof.intervals import Column, Floats
from dtprof.job.axes import axis_sizes
from dtprof.job.rank_executor import Executor

Result = TypeVar("Result")

ALL_RANKS = "all ranks"
TRACES = "traces"
PARTS_MS, PHASES_MS, MEMORY_BYTES = "parts_ms", "phases_ms", "memory_bytes"
"""Prefixes of tags with several quantities."""
_DEFINITIONS = {metric.name: metric.definition for metric in RANK}
DESCRIPTIONS = {
    "step_ms": "From the end of one step to the end of the next.",
    "exposed_ms": _DEFINITIONS["exposed_ns"],
    "step_slowest_ms": "What the slowest rank took for the step.",
    "step_fastest_ms": "What the fastest rank took for the step.",
    "tokens_per_s": "Tokens that the whole job consumed a second; of the measured steps.",
    "samples_per_s": "Samples that the whole job consumed a second; of the measured steps.",
    **{f"{PARTS_MS}/{part}": _DEFINITIONS[f"{part}_ns"] for part in PARTS},
}
PHASE, MEMORY = "Time of the step in this phase.", "The largest sample within the step."
OF_RANKS = "Median over ranks. "
MAX_POINTS = 1_000
"""TensorBoard shows so many points of a tag."""
MAX_SPREADS = 100
MAX_RANKS = 64
"""More runs than this are indistinguishable in TensorBoard."""
MAX_TRACE_EVENTS = 40_000
"""Of all ranks: torch-tb-profiler takes about a second for 20,000."""
MAX_TRACED_RANKS = 16
NO_PLUGIN = (
    "the tab of the traces needs torch-tb-profiler, which is not installed here; pip install 'dtprof[tensorboard]'"
)


@dataclass(frozen=True, kw_only=True)
class RankSeries:
    """One quantity a column, one step a row."""

    rank: int
    numbers: Column
    ended_s: Floats  # wall-clock time
    columns: dict[str, Floats]  # by tag, in the unit that the tag ends with

    def of_steps(self, first: int, last: int) -> "RankSeries":
        """Return those of some steps."""
        chosen = (self.numbers >= first) & (self.numbers <= last)
        columns = {tag: values[chosen] for tag, values in self.columns.items()}
        return RankSeries(rank=self.rank, numbers=self.numbers[chosen], ended_s=self.ended_s[chosen], columns=columns)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Texts and pictures of the whole run, by tag; shown with `all ranks`."""

    texts: Mapping[str, str] = field(default_factory=dict)  # Markdown
    pictures: Mapping[str, Picture] = field(default_factory=dict)


class RankMap(Protocol):
    """Does some work on every rank of a run."""

    def __call__(self, work: Callable[[RankDetail], Result], /) -> Sequence[Result]:
        """Return what is made of each rank, in order; both are picklable."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a log directory shows of a run."""

    run: RunDetail
    series: Sequence[RankSeries]
    traces: Sequence[RankTrace] | None  # None: of so many ranks there are none
    remarks: Sequence[str]  # on steps that the traces omit


def say_nothing() -> Account:
    """Return an empty one."""
    return Account()


@dataclass(kw_only=True)
class ScalarLogs:
    """The event files of a run; new steps of a running job are appended."""

    folder: Path
    logs: dict[str, EventFile] = field(default_factory=dict)
    written: int = 0  # the last step that was

    def append(self, run: RunDetail, series: Sequence[RankSeries]) -> list[str]:
        """Add the steps that every rank has ended since the last call; return remarks on omitted ones."""
        last = min((int(rank.numbers[-1]) for rank in series if len(rank.numbers)), default=0)
        first = min((int(rank.numbers[0]) for rank in series if len(rank.numbers)), default=1)
        stride = max(1, -(-(last - max(first, self.written + 1) + 1) // MAX_POINTS))
        shown = _spread_over([rank.rank for rank in series], MAX_RANKS)
        for rank in series:
            if rank.rank in shown:
                self._append_rank(rank, last, stride)
        self._append_all(series, last, stride, consumption(run))
        self.written = max(self.written, last)
        for log in self.logs.values():
            log.flush()
        said = [f"one step in {stride} of {format_count(last)} is a point of the scalars"] if stride > 1 else []
        if len(shown) < len(run.ranks):
            said.append(f"scalars are of {len(shown)} of {len(run.ranks)} ranks, and of all together")
        return said

    def tell(self, account: Account) -> None:
        """Add texts and pictures at the step that was written last."""
        log = self.log(ALL_RANKS)
        for tag, text in account.texts.items():
            log.text(self.written, tag, text)
        for tag, picture in account.pictures.items():
            log.picture(self.written, tag, picture)
        log.flush()

    def log(self, name: str) -> EventFile:
        """Return the log of this name."""
        if name not in self.logs:
            self.logs[name] = EventFile(self.folder / name)
        return self.logs[name]

    def close(self) -> None:
        """Write the remaining events."""
        for log in self.logs.values():
            log.__exit__(None, None, None)

    def _append_rank(self, rank: RankSeries, last: int, stride: int) -> None:
        chosen = _chosen(rank.numbers, self.written, last, stride)
        columns = {tag: values[chosen] for tag, values in rank.columns.items()}
        descriptions = {tag: self._describe(tag) for tag in columns}
        log = self.log(f"rank {rank.rank:05}")
        log.scalars(rank.numbers[chosen], rank.ended_s[chosen], columns, descriptions=descriptions)

    def _describe(self, tag: str) -> str:
        """Return the description of a tag; empty where it has none."""
        return {PHASES_MS: PHASE, MEMORY_BYTES: MEMORY}.get(tag.partition("/")[0]) or DESCRIPTIONS.get(tag, "")

    def _append_all(
        self, series: Sequence[RankSeries], last: int, stride: int, consumed: Mapping[str, Mapping[int, float]]
    ) -> None:
        longest = max(series, key=lambda rank: len(rank.numbers), default=None)
        if longest is None or not len(longest.numbers):
            return
        chosen = _chosen(longest.numbers, self.written, last, stride)
        numbers = longest.numbers[chosen]
        tables = {
            tag: np.stack([_at(rank, tag, numbers) for rank in series if tag in rank.columns])
            for tag in {tag: None for rank in series for tag in rank.columns}
        }
        durations, walls_s = tables["step_ms"], longest.ended_s[chosen]
        known = ~np.isnan(durations).all(axis=0)
        extremes = {"step_slowest_ms": np.fmax.reduce(durations), "step_fastest_ms": np.fmin.reduce(durations)}
        log = self.log(ALL_RANKS)
        of_job = {
            tag: np.array([text.get(step, np.nan) for step in numbers.tolist()]) for tag, text in consumed.items()
        }
        medians = {tag: known_medians(table) for tag, table in tables.items()}
        descriptions = {tag: OF_RANKS + text for tag in medians if (text := self._describe(tag))}
        descriptions |= {tag: self._describe(tag) for tag in extremes | of_job}
        log.scalars(numbers, walls_s, medians | extremes | of_job, descriptions=descriptions)
        every = -(-len(numbers) // MAX_SPREADS) if len(numbers) else 1
        for i in np.flatnonzero(known)[::every].tolist():
            spread = durations[:, i]
            log.histogram(int(numbers[i]), float(walls_s[i]), "step_over_ranks_ms", spread[~np.isnan(spread)])


def read_shown(run: RunDetail, *, steps: tuple[int, int] | None = None, on_ranks: RankMap | None = None) -> Shown:
    """Read what is shown of a run, rank by rank.

    Parameters:
        steps: the first and the last of the traces; None: the newest that fit.
        on_ranks: does the work on every rank; None: this process does it.
    """
    window = choose_window(run, steps=steps, max_events=MAX_TRACE_EVENTS)
    collect = trace_collector(run, window) if _is_traced(run) else None
    work = partial(_read_series, collect)
    results = list(map(work, read_ranks(run))) if on_ranks is None else on_ranks(work)
    return Shown(
        run=run,
        series=[columns for columns, _ in results],
        traces=None if collect is None else [trace for _, trace in results if trace is not None],
        remarks=window.describe(),
    )


def read_shown_by_ranges(run: RunDetail, executor: Executor, *, steps: tuple[int, int] | None = None) -> Shown:
    """Read what is shown of a run that was read by ranges of steps: so once more, and the steps of its traces."""
    parts: list[list[RankSeries]] = [[] for _ in run.ranks]
    for (first, last), found in map_ranges(run, rank_series, executor):
        for part, own in zip(parts, found, strict=True):
            part.append(own.of_steps(first, last))
    selected = read_chosen(run, executor, steps=steps, max_events=MAX_TRACE_EVENTS)
    window = choose_window(selected, steps=steps, max_events=MAX_TRACE_EVENTS)
    return Shown(
        run=run,
        series=[_join_series(part) for part in parts],
        traces=list(map_ranks(selected, trace_collector(selected, window), executor)) if _is_traced(run) else None,
        remarks=window.describe(),
    )


def _is_traced(run: RunDetail) -> bool:
    return len(run.ranks) <= MAX_TRACED_RANKS


def _join_series(parts: Sequence[RankSeries]) -> RankSeries:
    """Join the series of a rank; a phase that no step of a part has is 0 there, and what else it lacks nan."""
    tags = dict.fromkeys(tag for part in parts for tag in part.columns)
    return RankSeries(
        rank=parts[0].rank,
        numbers=np.concatenate([part.numbers for part in parts]),
        ended_s=np.concatenate([part.ended_s for part in parts]),
        columns={
            tag: np.concatenate(
                [
                    part.columns.get(tag, np.full(len(part.numbers), 0 if tag.startswith(PHASES_MS) else np.nan))
                    for part in parts
                ]
            )
            for tag in tags
        },
    )


def write_tensorboard(
    shown: Shown, folder: Path, *, account: Callable[[], Account] = say_nothing
) -> tuple[ScalarLogs, list[str]]:
    """Write the log directory; return the logs, to which steps can be added, and remarks on omitted parts."""
    logs, run = ScalarLogs(folder=folder), shown.run
    if shown.traces is not None:
        write_traces(shown.traces, folder / TRACES)
        said = list(shown.remarks)
        if find_spec("torch_tb_profiler") is None:
            said.append(NO_PLUGIN)
    else:
        said = [f"no traces: torch-tb-profiler keeps all of {len(run.ranks)} ranks in memory; use --format perfetto"]
    said += logs.append(run, shown.series)
    logs.log(ALL_RANKS).hyperparameters(describe_layout(run), *_wall_times(shown.series))
    logs.tell(account())
    return logs, said


def _read_series(
    collect: Callable[[RankDetail], RankTrace] | None, rank: RankDetail
) -> tuple[RankSeries, RankTrace | None]:
    return rank_series(rank), None if collect is None else collect(rank)


def append_steps(detail: RunDetail, logs: ScalarLogs) -> None:
    """Add the steps that a running job has ended since the last time."""
    logs.append(detail, [rank_series(rank) for rank in read_ranks(detail)])


def rank_series(rank: RankDetail) -> RankSeries:
    """Return the figures of each step of one rank, as the summary takes its means of them."""
    numbers, windows = rank.steps.numbers, rank.steps.windows
    columns: dict[str, Floats] = {"step_ms": (windows[:, 1] - windows[:, 0]) / 1e6}
    if rank.parts is not None:
        columns |= {f"{PARTS_MS}/{part}": spent / 1e6 for part, spent in rank.parts.items()}
        columns["exposed_ms"] = (
            sum((rank.parts[part] for part in EXPOSED_PARTS), np.zeros(len(numbers), np.int64)) / 1e6
        )
    columns |= {f"{PHASES_MS}/{phase}": spent / 1e6 for phase, spent in rank.phases.items() if spent.any()}
    columns |= _memory(rank)
    ended = (windows[:, 1] + rank.tables.monotonic_to_realtime_ns) / 1e9
    return RankSeries(rank=rank.tables.rank, numbers=numbers, ended_s=ended, columns=columns)


def consumption(run: RunDetail) -> dict[str, dict[int, float]]:
    """Return the throughput of the whole job in each measured step, by tag and step."""
    surveys = run.surveys
    found, _ = measure_throughput(
        run.steps, surveys.consumed, surveys.distinct_groups(), run.measured, incomplete=surveys.incomplete
    )
    if found is None:
        return {}
    rates = {"tokens_per_s": found.tokens_per_s_of_steps, "samples_per_s": found.samples_per_s_of_steps}
    return {tag: dict(enumerate(values, found.first_step)) for tag, values in rates.items() if values}


def _memory(rank: RankDetail) -> dict[str, Floats]:
    """Return the largest value of each sample of memory within each step; nan where there is none."""
    samples, windows = rank.tables.samples, rank.steps.windows
    largest_in_step: dict[str, Floats] = {}
    for op, name in enumerate(rank.tables.ops):
        rows = samples[samples["op"] == op]
        if not name.endswith("_bytes") or not len(rows) or not len(windows):
            continue
        at = np.searchsorted(windows[:, 1], rows["t_ns"], "left")
        inside = (at < len(windows)) & (rows["t_ns"] >= windows[np.minimum(at, len(windows) - 1), 0])
        largest = np.full(len(windows), -np.inf)
        np.maximum.at(largest, at[inside], rows["value"][inside].astype(np.float64))
        if inside.any():
            largest_in_step[f"{MEMORY_BYTES}/{name.removesuffix('_bytes')}"] = np.where(
                np.isinf(largest), np.nan, largest
            )
    return largest_in_step


def describe_layout(run: RunDetail) -> dict[str, str | float]:
    """Return how the job was laid out: ranks, hosts, and the size of each axis of parallelism."""
    facts = run.surveys.facts
    layout: dict[str, str | float] = {"world_size": float(run.surveys.world_size)}
    layout["hosts"] = float(len({fact.host for fact in facts if fact.host}))
    sizes = axis_sizes((group.axis, len(group.ranks) or group.size) for fact in facts for group in fact.groups.values())
    layout |= {f"size_{axis}": float(size) for axis, size in sizes.items()}
    backends = sorted({group.backend for fact in facts for group in fact.groups.values() if group.backend})
    layout["backend"] = ", ".join(backends) or "unknown"
    pipeline = next(iter(run.surveys.pipelines.values()), None)
    if pipeline is not None:
        layout["schedule"] = pipeline.pipeline.schedule
        layout["microbatches"] = float(pipeline.pipeline.num_microbatches)
    return layout


def _chosen(numbers: Column, written: int, last: int, stride: int) -> Column:
    """Return the rows of the steps to write; every stride-th counted from the last."""
    return np.flatnonzero((numbers > written) & (numbers <= last) & ((last - numbers) % stride == 0))


def _at(rank: RankSeries, tag: str, numbers: Column) -> Floats:
    """Return the values of these steps; nan where there is none."""
    if not len(rank.numbers):
        return np.full(len(numbers), np.nan)
    at = np.minimum(np.searchsorted(rank.numbers, numbers), len(rank.numbers) - 1)
    return np.where(rank.numbers[at] == numbers, rank.columns[tag][at], np.nan)


def _spread_over(ranks: Sequence[int], limit: int) -> set[int]:
    """Return all ranks, or of many as many as allowed, evenly chosen."""
    places = np.linspace(0, len(ranks) - 1, min(limit, len(ranks))) if ranks else np.zeros(0)
    return {ranks[i] for i in places.round().astype(np.int64).tolist()}


def _wall_times(series: Sequence[RankSeries]) -> tuple[float, float]:
    ended = [rank.ended_s for rank in series if len(rank.ended_s)]
    return min((float(times[0]) for times in ended), default=0.0), max(
        (float(times[-1]) for times in ended), default=0.0
    )
