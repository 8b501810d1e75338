"""Sample, while a job runs, the lines at which its ranks spend time that their records do not explain.

- A rank that is late again and again, at a notable cost, is sampled beside one that is on time. What the late rank does
  more than the other one, outside of operations, is the line that makes it late.
- One rank of this host is sampled alone, over some steps: its lines outside of what torch runs are its host time.

Both are a few samplings in a job.
"""

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprof import fence
from dtprof.launch.hot_lines import find_hot_lines
from dtprof.launch.launcher_thread import NICENESS, LauncherThread
from dtprof.launch.stack_profiles import (
    IN_OPERATION,
    Frame,
    Profile,
    ProfiledLine,
    WorkRates,
    describe_work,
    find_innermost,
    name_inner,
    take_profiles,
)
from dtprof.records import paths, writer
from dtprof.records.shared_follower import Subscription
from dtprof.records.user_files import is_user_file

if TYPE_CHECKING:
    from dtprof.analysis.stragglers.late_arrivals import LateArrivals, LateRank
    from dtprof.records.tables import RankTables

EVERY_S, EARLY_EVERY_S, EARLY_LOOKS = 1.0, 0.3, 30
"""Between two looks at the records; and between the first ones, for jobs that train for seconds alone."""
LATE_SAMPLE_S, SHORT_SAMPLE_S, LATE_RATE = 2.0, 1.0, 50
SHORT_PERIOD_NS = 250_000_000
"""From one late arrival to the next, up to which the shorter sampling sees several."""
MOST_LATE_SAMPLINGS = 4
PAUSE_S = 60.0
"""Between two samplings of late ranks."""
FEWEST_SAMPLES, MIN_EXCESS = 20, 0.1
"""Of a profile, and the share of the samples that the late rank has more of at the line."""
ALONE_SAMPLES, ALONE_SAMPLE_S, ALONE_STEPS = 250, (5.0, 60.0), 4
"""Of a rank sampled alone: samples, bounds of how long its sampling lasts, and the steps that it covers if it can."""
STEADY_STEPS, STEADY_S = 10, 5.0
"""Steps, and the time they have to take, before a rank is sampled alone: the first ones compile and fill caches."""
ALONE_SAMPLINGS, ALONE_PAUSE_S = 2, 600.0
"""Samplings of a rank alone, and the time between them."""


def compare_profiles(late: Profile, on_time: Profile) -> ProfiledLine | None:
    """Return the line that the late rank spends most more of its time at; None where no line stands out."""
    if min(late.samples, on_time.samples) < FEWEST_SAMPLES:
        return None
    lines, others = _by_line(late), _by_line(on_time)
    shares = {
        frame: inner.total() / late.samples - others.get(frame, Counter()).total() / on_time.samples
        for frame, inner in lines.items()
    }
    frame = max(shares, key=shares.__getitem__, default=None)
    if frame is None or shares[frame] < MIN_EXCESS:
        return None
    (innermost, _), *_ = lines[frame].most_common(1)
    return ProfiledLine(frame=frame, share=round(shares[frame], 3), innermost=innermost)


def _by_line(profile: Profile) -> dict[Frame, Counter[Frame]]:
    """Return the samples outside of operations by the program's innermost line, each by what it does there."""
    lines: dict[Frame, Counter[Frame]] = {}
    for stack, count in profile.stacks.items():
        last = max((i for i, frame in enumerate(stack) if is_user_file(frame.file)), default=None)
        if last is not None and not any(frame.file.endswith(IN_OPERATION) for frame in stack):
            lines.setdefault(stack[last], Counter())[find_innermost(stack[last:])] += count
    return lines


class Progress:
    """The steps of the lowest rank of this host, as far as its records tell."""

    def __init__(self) -> None:
        """Start with none."""
        self.rank, self.pid = -1, 0
        self._first = self._newest = (0, 0)  # step, and when the rank was in it, ns

    def take(self, tables: "RankTables") -> None:
        """Add the spans that have been recorded since; those of a new process start anew."""
        spans = tables.spans
        if not len(spans) or (self.pid and tables.rank > self.rank):
            return
        first, newest = (
            (int(spans["step"][row]), int(spans["begin_ns"][row]))
            for row in (spans["step"].argmin(), spans["step"].argmax())
        )
        if tables.pid != self.pid:
            self.rank, self.pid, self._first, self._newest = tables.rank, tables.pid, first, newest
        self._newest = max(self._newest, newest)

    def step_s(self) -> float | None:
        """Return how long a step takes; None until there are enough of them."""
        steps, took_ns = self._newest[0] - self._first[0], self._newest[1] - self._first[1]
        return took_ns / steps / 1e9 if steps >= STEADY_STEPS and took_ns >= STEADY_S * 1e9 else None


class LineSampler:
    """Watches the records of this host's ranks until it is stopped, and samples those that it learns more of."""

    def __init__(self, records: Subscription, node_folder: Path) -> None:
        """Start at once."""
        self._records, self._folder = records, node_folder
        self._thread = LauncherThread(self._work, "line-sampler", niceness=NICENESS)
        self._thread.start()

    def stop(self) -> None:
        """Stop, in the middle of a sampling, too."""
        self._thread.stop()

    @fence.fenced("the sampling of lines", "has ended; the job goes on")
    def _work(self) -> None:
        try:
            self._watch()
        finally:
            self._records.close()

    def _watch(self) -> None:
        from dtprof.analysis.stragglers.late_arrivals import LateArrivals  # the start of a job does not wait for it

        arrivals, progress = LateArrivals(), Progress()
        late_samplings, newest_late_s = 0, -PAUSE_S
        alone_samplings, newest_alone_s = 0, -ALONE_PAUSE_S
        pauses_s = itertools.chain(itertools.repeat(EARLY_EVERY_S, EARLY_LOOKS), itertools.repeat(EVERY_S))
        while not self._thread.ended.wait(next(pauses_s)):
            for growths, _ in self._records.take():
                arrivals.take(growth.tables for growth in growths.values())
                for growth in growths.values():
                    progress.take(growth.tables)
            now_s = time.monotonic()
            late = arrivals.find_late() if late_samplings < MOST_LATE_SAMPLINGS else None
            if late is not None and now_s - newest_late_s >= PAUSE_S:
                self._sample_late(late, arrivals)
                late_samplings, newest_late_s = late_samplings + 1, time.monotonic()
                arrivals.forget()
            elif alone_samplings < ALONE_SAMPLINGS and now_s - newest_alone_s >= ALONE_PAUSE_S:
                step_s = progress.step_s()
                if step_s is not None:
                    self._sample_alone(progress, step_s)
                    alone_samplings, newest_alone_s = alone_samplings + 1, time.monotonic()
            if late_samplings == MOST_LATE_SAMPLINGS and alone_samplings == ALONE_SAMPLINGS:
                return

    def _sample_late(self, lateness: "LateRank", arrivals: "LateArrivals") -> None:
        pids = [arrivals.pids.get(rank, 0) for rank in (lateness.late, lateness.on_time)]
        is_short = lateness.period_ns is not None and lateness.period_ns <= SHORT_PERIOD_NS
        duration_s = SHORT_SAMPLE_S if is_short else LATE_SAMPLE_S
        taken = take_profiles(pids, self._thread.ended, duration_s=duration_s, rate=LATE_RATE)
        if not taken:
            return
        (late, rates), (on_time, others) = taken
        found = compare_profiles(late, on_time)
        if found is None:
            return
        row = _about(lateness.late, late) | {"on_time": lateness.on_time}
        does = (
            describe_work(found, rates, others if lateness.same_traffic else WorkRates())
            or f"what it does{name_inner(found)} is not known"
        )
        writer.append_line(self._folder / paths.LATENESS, row | _described(found, does))

    def _sample_alone(self, progress: Progress, step_s: float) -> None:
        shortest_s, longest_s = ALONE_SAMPLE_S
        duration_s = min(max(ALONE_STEPS * step_s, shortest_s), longest_s)
        rank, rate = progress.rank, max(ALONE_SAMPLES / duration_s, 1)
        for profile, rates in take_profiles([progress.pid], self._thread.ended, duration_s=duration_s, rate=rate):
            lines = [_described(line, describe_work(line, rates)) for line in find_hot_lines(profile)]
            writer.append_line(self._folder / paths.HOT_LINES, _about(rank, profile) | {"lines": lines})


def _about(rank: int, profile: Profile) -> dict[str, Any]:
    return {"t_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC), "rank": rank, "samples": profile.samples}


def _described(line: ProfiledLine, does: str | None) -> dict[str, Any]:
    of_inner = {"inner_file": line.innermost.file, "inner_function": line.innermost.function}
    return {**line.frame._asdict(), "share": line.share, **of_inner, "does": does}
