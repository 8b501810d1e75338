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
from pathlib import Path

from benchmarks import pairs
from benchmarks.kineto_traces import Shape, write_traces

RANKS = 2
EVENTS = 200_000
"""Of each rank, about."""
RUNS = 2
_HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
print(analysis.get_comm_comp_overlap(visualize=False).to_string())
"""


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
        own = [_measure(_own_command(folder, number)) for number in range(RUNS)]
        _report("dtprof import and summary", events, own)
        hta = os.environ.get("HTA_PYTHON")
        if hta is None:
            print("HTA_PYTHON names no interpreter with HolisticTraceAnalysis: no ratio")
            return
        theirs = [_measure([hta, "-c", _HTA, str(folder / "traces")]) for _ in range(RUNS)]
        _report("HTA load and overlap", events, theirs)
        ratios = [b[1] / a[1] for a, b in zip(own, theirs, strict=True)]
        walls = [b[0] / a[0] for a, b in zip(own, theirs, strict=True)]
        print(f"ratio of processor time {pairs.spread(ratios, 1)}, of wall time {pairs.spread(walls, 1)}")


def _own_command(folder: Path, number: int) -> list[str]:
    run = folder / f"run{number}"
    program = (
        "import sys; from dtprof.cli.main import main; "
        "sys.exit(main(['import', sys.argv[1], '-o', sys.argv[2]]) or main(['summary', sys.argv[2], '--json']))"
    )
    return [sys.executable, "-c", program, str(folder / "traces"), str(run)]


def _measure(command: list[str]) -> tuple[float, float, float]:
    """Return wall time, processor time (s) and the most memory of any of its processes (MiB)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss / 1024


def _report(name: str, events: int, measured: list[tuple[float, float, float]]) -> None:
    wall, cpu, memory = zip(*measured, strict=True)
    rate = pairs.spread([events / seconds / 1000 for seconds in cpu], 0)
    print(f"{name}: wall {pairs.spread(wall)} s, processor {pairs.spread(cpu)} s, {rate} k events/s of a core")
    print(f"  highest memory of a process so far {max(memory):.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_traces(Path(sys.argv[2]), shape_of(int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
