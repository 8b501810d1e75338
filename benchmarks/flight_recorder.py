"""How long `dtprof diagnose` takes for the Flight Recorder dumps of a large job, and how much memory.

`python -m benchmarks.flight_recorder write DIR RANKS` only writes the dumps: a job with tensor parallelism in which one
rank never comes to an all_reduce of all ranks.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.torch_pickle import as_torch_pickles, encoded_text

ENTRIES = 2000
TENSOR_PARALLEL = 8
FRAMES = 20
TORCH = "/opt/conda/lib/python3.11/site-packages/torch/distributed"
BEGIN_NS = 1_758_581_237_000_000_000
NAMES = ("tensor group of the rank", "ranks of the tensor group", "ranks of the job")
"""Text that is replaced in every rank's dump: building each from nothing would take minutes."""


def culprit_of(ranks: int) -> int:
    """Return the rank that never comes."""
    return ranks // 3


def write_dumps(folder: Path, ranks: int, entries: int = ENTRIES) -> None:
    """Write the dumps of a job, each as torch's pickler writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting, absent = (as_torch_pickles(_document(entries, behind=behind)) for behind in (0, 1))
    for rank in range(ranks):
        first = rank // TENSOR_PARALLEL * TENSOR_PARALLEL
        members = list(range(first, min(first + TENSOR_PARALLEL, ranks)))
        data = absent if rank == culprit_of(ranks) else waiting
        actual = (str(1 + rank // TENSOR_PARALLEL), str(members), str(list(range(ranks))))
        for name, text in zip(NAMES, actual, strict=True):
            data = data.replace(encoded_text(name), encoded_text(text))
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)


def _document(entries: int, *, behind: int) -> dict[str, Any]:
    tensor, members, everyone = NAMES
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": everyone},
        tensor: {"name": tensor, "desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": members},
    }
    built = [_entry(i, entries) for i in range(entries)][: entries - behind]
    return {"version": "2.10", "nccl_version": "2.27.5", "pg_config": config, "pg_status": {}, "entries": built}


_WRAPPERS = [
    {"name": "all_reduce", "filename": f"{TORCH}/distributed_c10d.py", "line": 3245},
    {"name": "wrapper", "filename": f"{TORCH}/c10d_logger.py", "line": 83},
]
_OUTER = [{"name": f"step_{i}", "filename": "/home/user/job/train.py", "line": 100 + i} for i in range(FRAMES - 3)]
_LAYERS = [{"name": "forward", "filename": "/home/user/job/model.py", "line": line} for line in range(40, 72)]


def _entry(i: int, entries: int) -> dict[str, Any]:
    last = i == entries - 1
    is_default = last or i % 32 == 31
    seq = 1000 + (i // 32 if is_default else i - i // 32)
    created = BEGIN_NS + i * 1_000_000
    done = None if last else created + 400_000
    return {
        "frames": [*_WRAPPERS, _LAYERS[i % 32], *_OUTER],
        "record_id": 1_000_000 + i,
        "pg_id": 0 if is_default else 1,
        "process_group": ("0", "default_pg") if is_default else (NAMES[0], "TENSOR_MODEL_PARALLEL_GROUP"),
        "thread_name": "python3",
        "thread_id": "140567239830400",
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "input_sizes": [[2048, 1, 5120]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[2048, 1, 5120]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled" if last else "completed",
        "time_discovered_started_ns": None if last else created + 10_000,
        "time_discovered_completed_ns": done,
        "retired": not last,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def measure(folder: Path, ranks: int) -> tuple[float, float, float]:
    """Return wall time and processor time in s and the largest resident set in MB, having checked the answer."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    command = ["/usr/bin/env", sys.executable, "-m", "dtprof", "diagnose", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    wall_s = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (finding,) = json.loads(done.stdout)["findings"]
    if finding["culprit_ranks"] != [culprit_of(ranks)]:
        raise ValueError(f"rank {culprit_of(ranks)} held the job up; found {finding['summary']}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, spent, after.ru_maxrss / 1024


def main() -> None:
    """Write dumps of three jobs and diagnose each."""
    for ranks, entries in ((8, 200), (256, ENTRIES), (1024, ENTRIES)):
        with tempfile.TemporaryDirectory() as name:
            write_dumps(Path(name), ranks, entries)
            size = sum(file.stat().st_size for file in Path(name).iterdir())
            runs = [measure(Path(name), ranks) for _ in range(3)]
        print(
            f"{ranks} ranks x {entries} entries, {size / 1e6:.0f} MB: "
            f"wall {pairs.spread([wall for wall, _, _ in runs])} s, "
            f"processor {pairs.spread([spent for _, spent, _ in runs])} s, "
            f"peak {max(peak for _, _, peak in runs):.0f} MB"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_dumps(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        pairs.run_alone(main, __doc__)
