"""Steps whose computation sleeps, so that a rerun after a change takes what it takes on a busy machine, too.

Environment: WHO and SLOW, a rank and how many times as long it computes; LATE, seconds by which input is late.
"""

import os
import time

import torch
import torch.distributed as dist

import dtprof

STEPS, BUCKETS = 14, 4


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_slow = dist.get_rank() == int(os.environ.get("WHO", "-1"))
    factor = float(os.environ.get("SLOW", "1")) if is_slow else 1.0
    buckets = [torch.ones(100_000) for _ in range(BUCKETS)]
    for _ in range(STEPS):
        with dtprof.phase("data"):
            time.sleep(0.01 + float(os.environ.get("LATE", "0")))
        with dtprof.phase("forward"):
            time.sleep(0.06 * factor)
        with dtprof.phase("backward"):
            works = []
            for bucket in buckets:
                time.sleep(0.12 * factor / BUCKETS)
                works.append(dist.all_reduce(bucket, async_op=True))
            for work in works:
                work.wait()
        with dtprof.phase("optimizer"):
            time.sleep(0.01)
        dtprof.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
