"""How fast `dtprof import` reads traces of torch.profiler, and how much memory it takes, beside HolisticTraceAnalysis.

HolisticTraceAnalysis (HTA) runs where an interpreter that has it is named:

    python -m venv hta && hta/bin/pip install HolisticTraceAnalysis 'pandas<3'
    HTA_PYTHON=hta/bin/python python -m benchmarks import_speed

Both read the same files in the same call: HTA its load and its overlap of communication, dtprof its import and its
summary. `python -m benchmarks.import_speed write DIR RANKS EVENTS` only writes traces.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import pairs
from benchmarks.kineto_traces import Shape, write_traces

RANKS = 2
EVENTS = 200_000
"""Of each rank, about."""
RUNS = 2
_CLOCK = """
import resource, sys, time
def spent():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)
"""
_HTA = (
    _CLOCK
    + """
from hta.trace_analysis import TraceAnalysis
begin, cpu = time.perf_counter(), spent()
analysis = TraceAnalysis(trace_dir=sys.argv[1])
loaded = time.perf_counter() - begin, spent() - cpu
analysis.get_comm_comp_overlap(visualize=False)
print("LOADED", *loaded)
"""
)
_OWN = (
    _CLOCK
    + """
from dtprof.cli.main import main
begin, cpu = time.perf_counter(), spent()
main(["import", sys.argv[1], "-o", sys.argv[2]])
loaded = time.perf_counter() - begin, spent() - cpu
main(["summary", sys.argv[2], "--json"])
print("LOADED", *loaded)
"""
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one program took, s, and the most memory of any of its processes."""

    wall: float
    cpu: float
    load_wall: float  # of that, to read the traces
    load_cpu: float
    mebibytes: float


def shape_of(ranks: int, events: int) -> Shape:
    """Return traces of about so many events a rank."""
    shape = Shape(ranks=ranks, steps=20, layers=50, kernels=12, operators=8)
    per_step = shape.layers * (shape.kernels * (shape.operators + 2) + 2) + 1
    return Shape(ranks=ranks, steps=max(2, round(events / per_step)), layers=50, kernels=12, operators=8)


def main() -> None:
    """Measure both in turn and print the ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_traces(folder / "traces", shape_of(RANKS, EVENTS))
        size = sum(path.stat().st_size for path in paths)
        events = sum(path.read_bytes().count(b'"ph"') for path in paths)
        print(f"{RANKS} traces, {events:,} events, {size >> 20} MiB")
        own = [
            _measure([sys.executable, "-c", _OWN, str(folder / "traces"), str(folder / str(i))]) for i in range(RUNS)
        ]
        _report("dtprof import, and summary", events, own)
        hta = os.environ.get("HTA_PYTHON")
        if hta is None:
            print("HTA_PYTHON names no interpreter with HolisticTraceAnalysis: no ratio")
            return
        theirs = [_measure([hta, "-c", _HTA, str(folder / "traces")]) for _ in range(RUNS)]
        _report("HTA load, and overlap", events, theirs)
        for what in ("load_cpu", "load_wall", "cpu", "wall"):
            ratios = [getattr(b, what) / getattr(a, what) for a, b in zip(own, theirs, strict=True)]
            print(f"HTA over dtprof, {what.replace('_', ' ')}: {pairs.spread(ratios, 1)}")


def _measure(command: list[str]) -> Measured:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    load_wall, load_cpu = map(float, done.stdout.splitlines()[-1].split()[1:])
    return Measured(
        wall=wall,
        cpu=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        load_wall=load_wall,
        load_cpu=load_cpu,
        mebibytes=after.ru_maxrss / 1024,
    )


def _report(name: str, events: int, measured: list[Measured]) -> None:
    rate = pairs.spread([events / one.load_cpu / 1000 for one in measured], 0)
    print(f"{name}: reads {rate} k events/s of a core, in {pairs.spread([one.load_wall for one in measured])} s")
    whole = (
        f"{pairs.spread([one.wall for one in measured])} s, processor {pairs.spread([one.cpu for one in measured])} s"
    )
    print(f"  whole program {whole}; highest memory of a process so far {measured[-1].mebibytes:.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_traces(Path(sys.argv[2]), shape_of(int(sys.argv[3]), int(sys.argv[4])))
    else:
        pairs.run_alone(main, __doc__)
