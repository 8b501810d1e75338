"""How fast a run is exported, in processor time, and how large that is: every format of `dtprof export`.

The run is generated (tests/synthetic): 8 ranks of 152,000 events with tensor and pipeline parallelism. Figures are
medians of fresh processes, the start of Python and reading the run included. BENCHMARK_REPEATS says how often.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.analysis_speed import generate
from benchmarks.pairs import run_alone, show

RANKS, EVENTS = 8, 152_000
REPEATS = int(os.environ.get("BENCHMARK_REPEATS", "3"))
FORMATS = ("perfetto", "chrome", "kineto", "tensorboard", "parquet", "csv")
_MEASURE = """
import json, resource, sys, time
from dtprof.cli.main import main
wall = time.perf_counter()
assert main(["export", sys.argv[1], "--format", sys.argv[2], "-o", sys.argv[3], "--force"]) == 0
wall = time.perf_counter() - wall
own, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = [usage.ru_utime + usage.ru_stime for usage in (own, workers)]
print(json.dumps([*cpu, wall, own.ru_maxrss * 1024]))
"""


def measure(run: Path, kind: str, out: Path) -> tuple[float, float, float, int]:
    """Export a run in a process of its own; return its processor time, its workers', wall time and its peak memory."""
    command = [sys.executable, "-c", _MEASURE, str(run), kind, str(out)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    own_s, workers_s, wall_s, peak = json.loads(output.splitlines()[-1])
    return own_s, workers_s, wall_s, peak


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(one.stat().st_size for one in (path.rglob("*") if path.is_dir() else [path]) if one.is_file())


def main() -> None:
    """Measure every format."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = generate(folder, RANKS, EVENTS)
        for kind in FORMATS:
            out = folder / kind
            found = [measure(run, kind, out) for _ in range(REPEATS)]
            name = f"{kind}, {RANKS} ranks of {EVENTS:,} events"
            print(f"{name}, {REPEATS} processes: {size_of(out) / 1e6:.1f} MB")
            show(name, "processor time [s]", [own_s for own_s, _, _, _ in found])
            show(name, "of all workers [s]", [workers_s for _, workers_s, _, _ in found])
            show(name, "wall time [s]", [wall for _, _, wall, _ in found])
            show(name, "peak memory [MB]", [peak / 1e6 for _, _, _, peak in found], 0)


if __name__ == "__main__":
    run_alone(main, __doc__)
