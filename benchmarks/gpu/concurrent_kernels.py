"""Whether recording disturbs computation beside an all_reduce, also where one hardware queue feeds all streams."""

import json

from benchmarks.gpu.figures import emit_ratio
from benchmarks.gpu.placement import backend, recorded, run_job, scratch, torchrun
from benchmarks.pairs import Comparison

NUM_RANKS = 2
GOAL = 0.002


def main() -> None:
    """Measure with the usual number of hardware queues and with one."""
    for name, connections in (("usual queues", {}), ("one queue", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})):
        with scratch() as folder:
            program = torchrun(NUM_RANKS, "-m", "benchmarks.gpu.overlapping_products", str(folder), backend())
            run_job(recorded(folder / "run", program), environment=connections, timeout_s=80)
            times = json.loads((folder / "times.json").read_text())
        compared = Comparison(unit="ms", a=tuple(bare for bare, _ in times), b=tuple(ours for _, ours in times))
        emit_ratio(f"12 layers of products beside an all_reduce, {name}", compared, most=GOAL)


if __name__ == "__main__":
    main()
