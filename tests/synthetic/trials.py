"""How often the analysis of generated jobs is right: `python -m tests.synthetic.trials KIND... [--runs 40]`.

What it finds is written down in docs/explanation/measurements/known-truth.md.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dtprof.analysis.comparison.comparison_series import measure_run
from dtprof.analysis.comparison.run_comparison import compare_runs
from dtprof.analysis.map_reduce.survey import survey_run
from dtprof.analysis.results import Summary
from dtprof.analysis.whatif.advice import summarise_advised
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.job.world_size import newest_ranks
from dtprof.records.reader import Run, open_run
from tests.analysis.noisy_runs import STEP_US, noisy_run
from tests.synthetic import HostClock, Job, Spell, Truth, generate, take_turns
from tests.synthetic.simulation import Simulation

STRAGGLERS = ("sound", "pipelines", "one", "two", "host", "begins", "moves", "skewed", "apart", "tensor")
COMPARISONS = ("unrelated", "related", "drifting", "related-drifting")
CHANGE = 0.03
APART_HOSTS = 8
ROUNDING_NS = 100
"""Times of records and corrections are whole nanoseconds, and a step has some dozen of them."""


def draw_job(kind: str, seed: int) -> Job:
    """Return a job of up to 32 ranks, and who is slow in it."""
    random = np.random.default_rng((seed, STRAGGLERS.index(kind)))
    pp = int(random.choice([2, 4])) if kind == "pipelines" else 1
    layouts = [(dp, tp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if 4 <= dp * tp * pp <= 32]
    if kind == "tensor":
        layouts = [(1, 8), (2, 8), (4, 8), (1, 16), (2, 16), (1, 32)]
    dp, tp = layouts[random.integers(len(layouts))]
    job = Job(
        pp=pp,
        dp=dp,
        tp=tp,
        steps=int(random.integers(12, 40)),
        microbatches=int(random.integers(1, 4)) * pp,
        layers=int(random.integers(1, 4)),
        jitter=float(random.choice([0.02, 0.05, 0.1, 0.2])),
        dp_ns=int(random.integers(10_000, 2_000_000)),
        tp_ns=int(random.integers(10_000, 500_000)),
        message_ns=int(random.integers(10_000, 300_000)),
        overlapped=bool(random.integers(2)),
        seed=int(random.integers(1 << 30)),
    )
    factor, ranks = float(random.uniform(1.4, 2.0)), random.permutation(job.world_size).tolist()
    if kind in ("host", "skewed"):
        per_host = max(2, job.world_size // 4)
        clocks = {host: _draw_clock(random) for host in range(1, job.world_size // per_host)}
        job = replace(job, ranks_per_host=per_host, clocks=clocks)
    if kind == "apart":
        clocks = {host: _draw_clock_apart(random) for host in range(1, APART_HOSTS)}  # the first is true
        job = replace(job, dp=16 // (job.tp * job.pp), ranks_per_host=16 // APART_HOSTS, clocks=clocks)
        ranks = random.permutation(job.world_size).tolist()
    spells: dict[str, tuple[Spell, ...]] = {
        "apart": (Spell(ranks=(ranks[0],), factor=factor),),
        "one": (Spell(ranks=(ranks[0],), factor=factor),),
        "tensor": (Spell(ranks=(ranks[0],), factor=factor),),
        "skewed": (Spell(ranks=(ranks[0],), factor=factor),),
        "two": (Spell(ranks=(ranks[0],), factor=factor), Spell(ranks=(ranks[1],), factor=random.uniform(1.3, 1.8))),
        "host": (Spell(ranks=job.ranks_on(ranks[0] % 4) or job.ranks_on(0), factor=factor),),
        "begins": (Spell(ranks=(ranks[0],), factor=factor, first=int(random.integers(3, job.steps - 5))),),
        "moves": take_turns(ranks[: random.integers(2, 6)], factor, every=int(random.integers(1, 8)), steps=job.steps),
    }
    return replace(job, spells=spells.get(kind, ()))


def _draw_clock(random: np.random.Generator) -> HostClock:
    return HostClock(
        offset_ns=int(random.integers(10**12)),
        drift_ppm=float(random.uniform(-50, 50)),
        error_ns=int(random.integers(1_000, 300_000)),
        measured=bool(random.random() < 0.7),
    )


def _draw_clock_apart(random: np.random.Generator) -> HostClock:
    return replace(
        _draw_clock(random), offset_ns=int(random.integers(30 * 10**9)), drift_ppm=float(random.uniform(-200, 200))
    )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one run; errors as shares of the step."""

    wrong: bool  # somebody was listed who is not slow
    missed: bool  # somebody who is slow was not
    told: bool  # that slowness moves
    gain_error: (
        float | None
    )  # of what all listed cost together, or one alone in a pipeline; None where some are missing
    lag_held: bool | None  # the lag of one that is slow alone lies in its bounds; None: there are none
    part_error: float  # of the part of a step that is farthest from the truth, over what was stated of that rank
    clock_error: (
        float  # of the host whose clock is farthest from the truth at the begin, middle or end, over the stated
    )


def try_job(job: Job) -> Trial:
    """Let a job run, analyse it, and compare the result with the truth."""
    with tempfile.TemporaryDirectory() as folder:
        truth = generate(Path(folder) / "run", job)
        run = open_run(Path(folder) / "run")
        summary = summarise_advised(run)
        clock_error = _clock_error(job, truth, run) if job.clocks else 0.0
    slow = {rank for spell in job.spells for rank in spell.ranks}
    listed = [straggler.rank for straggler in (summary.stragglers or ())]
    return Trial(
        wrong=bool(set(listed) - slow),
        missed=bool(slow - set(listed)),
        told=any(caveat.startswith("stragglers: in") for caveat in summary.cannot_tell),
        gain_error=_gain_error(job, truth, summary) if listed and set(listed) == slow else None,
        lag_held=_lag_held(job, truth, summary) if listed and set(listed) == slow else None,
        part_error=_part_error(truth, summary),
        clock_error=clock_error,
    )


def _steps(job: Job, truth: Truth, summary: Summary) -> tuple[float, float]:
    """Return the mean measured step, and what it would have been without slow ranks."""
    first, last = summary.steps.used or (1, 0)
    sound = Simulation(replace(job, spells=())).run()
    step, without = (float((one.end - one.begin)[first - 1 : last].mean()) for one in (truth, sound))
    return step, without


def _lag_held(job: Job, truth: Truth, summary: Summary) -> bool | None:
    bounds = (summary.stragglers or ())[0].replayed_lag_interval_ns_per_step
    step, without = _steps(job, truth, summary)
    return None if bounds is None else bounds[0] <= step - without <= bounds[1]


def _gain_error(job: Job, truth: Truth, summary: Summary) -> float | None:
    step, without = _steps(job, truth, summary)
    own = (summary.stragglers or ())[-1]
    found = own.together_ns_per_step if own.replayed_lag_ns_per_step is None else own.replayed_lag_ns_per_step
    return None if found is None else (found - (step - without)) / step


def _part_error(truth: Truth, summary: Summary) -> float:
    errors = (
        abs(rank.partition_ns[part] - expected) / (ROUNDING_NS + (rank.partition_error_ns or 0))
        for rank in summary.ranks
        if rank.partition_ns is not None
        for part, expected in truth.mean_parts(rank.rank, *summary.steps.used or (1, 0)).items()
    )
    return max(errors, default=0.0)


def _clock_error(job: Job, truth: Truth, run: Run) -> float:
    """Return how far the worst clock is off, at each end of a step, over what is stated of it."""
    clocks = survey_run(run, newest_ranks(run.folders), THIS_PROCESS).clocks
    worst = 0.0
    for host in range(1, job.world_size // job.ranks_per_host):
        boot = f"boot-{host}"
        if boot not in clocks.errors_ns:
            continue
        moments = truth.end[:, host * job.ranks_per_host]
        own, reference = job.show_all(moments, host), job.show_all(moments, 0)
        off = np.abs(own + clocks.offset(boot, own) - reference).max()
        worst = max(worst, float(off) / (ROUNDING_NS + clocks.errors_ns[boot]))
    return worst


def compare_pairs(kind: str, runs: int, num_steps: int) -> Counter[str]:
    """Return how often two runs of one job, and one that is CHANGE slower, are told apart."""
    memory, drift = (0.7 if "related" in kind.split("-") else 0.0), (0.05 if "drifting" in kind else 0.0)
    longer_us = CHANGE * sum(STEP_US.values())
    found: Counter[str] = Counter()
    for seed in range(runs):
        a, again, longer = (
            measure_run(noisy_run(10 * seed + i, num_steps=num_steps, memory=memory, drift=drift, delay_us=delay))
            for i, delay in enumerate((0.0, 0.0, longer_us))
        )
        same, changed = compare_runs(a, again, at_least=0.0), compare_runs(a, longer)
        step = changed.step
        assert step is not None
        assert step.low is not None
        assert step.high is not None
        found["false alarm, step"] += same.step is not None and same.step.differs
        found["false alarm, any figure"] += same.differs
        found["found, step"] += step.verdict == "larger"
        found["found, any figure"] += changed.differs
        found["interval holds"] += step.low <= longer_us * 1_000 <= step.high
    return found


def _describe(trials: Iterable[Trial]) -> str:
    every = list(trials)
    gains = [trial.gain_error for trial in every if trial.gain_error is not None]
    text = (
        f"wrong {sum(t.wrong for t in every)}, missed {sum(t.missed for t in every)}, told {sum(t.told for t in every)}"
    )
    text += f", parts beyond what is stated {sum(t.part_error > 1 for t in every)}"
    text += f" (most {max(t.part_error for t in every):.2f} of it)"
    text += f", clocks {sum(t.clock_error > 1 for t in every)} ({max(t.clock_error for t in every):.2f})"
    held = [trial.lag_held for trial in every if trial.lag_held is not None]
    if held:
        text += f"; lag within its bounds {sum(held)} of {len(held)}"
    if gains:
        off = np.abs(gains)
        text += (
            f"; gain off by {np.median(off):.1%} of a step (90 %: {np.quantile(off, 0.9):.1%}, most {off.max():.1%})"
        )
        text += f", {np.mean(gains):+.1%} on average"
    return text


def main(arguments: list[str]) -> int:
    """Try jobs of each kind and say how often the analysis was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.synthetic.trials", description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=(*STRAGGLERS, *COMPARISONS), metavar="KIND")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=100, help="of each run that is compared")
    options = parser.parse_args(arguments)
    for kind in options.kinds:
        if kind in STRAGGLERS:
            text = _describe(
                try_job(draw_job(kind, seed)) for seed in range(options.first, options.first + options.runs)
            )
        else:
            text = ", ".join(f"{name} {n}" for name, n in compare_pairs(kind, options.runs, options.steps).items())
        print(f"{kind}, {options.runs} runs: {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
