"""Write a run of a synthetic job: `python -m tests.synthetic --ranks 1024 --events 20000 OUT`."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tests.synthetic.job import Job
from tests.synthetic.simulation import Simulation
from tests.synthetic.writing import generate


def sized(job: Job, num_events: int) -> Job:
    """Return the job with as many steps as give each rank about so many events, 3 at least."""
    one = Simulation(replace(job, steps=1))
    one.run()
    per_step = max(len(tape) for tape in one.tapes)
    return replace(job, steps=max(3, round(num_events / per_step)))


def main(arguments: list[str]) -> int:
    """Write the run and say how large it is."""
    parser = argparse.ArgumentParser(prog="python -m tests.synthetic", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--events", type=int, default=2_000, help="of each rank, about")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--slow", type=int, action="append", default=[], metavar="RANK", help="computes 1.3 times as long"
    )
    parser.add_argument("--ranks-per-host", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="the log has these events so many times over")
    parser.add_argument("--archived", action="store_true", help="full segments are compressed")
    options = parser.parse_args(arguments)
    if options.ranks % (options.tp * options.pp):
        parser.error(f"{options.ranks} ranks cannot be laid out with tp {options.tp} and pp {options.pp}")
    job = Job(
        tp=options.tp,
        pp=options.pp,
        dp=options.ranks // (options.tp * options.pp),
        microbatches=options.microbatches,
        layers=options.layers,
        jitter=0.02,
        slow=dict.fromkeys(options.slow, 1.3),
        ranks_per_host=options.ranks_per_host,
        archived=options.archived,
        repeats=options.repeats,
    )
    truth = generate(options.out, sized(job, options.events))
    print(f"{job.world_size} ranks, {len(truth.begin)} steps: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
