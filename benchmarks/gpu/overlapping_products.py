"""Pairs of matrix products beside an all_reduce, bare and recorded in turn: a rank of `concurrent_kernels`.

As in tensor-parallel layers: the gradient of the input is reduced while that of the weight is computed. With
CUDA_DEVICE_MAX_CONNECTIONS=1, a stream that waits can hold up the launches of all others.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist

LAYERS = 12
ROWS, WIDTH, PAIRS = (64, 64, 12) if sys.argv[2] == "gloo" else (4096, 2048, 120)


def main(folder: Path, backend: str) -> None:
    """Measure, and leave the times behind."""
    cuda = backend == "nccl"
    device = torch.device("cuda:0" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    exclude, key = torch._C._dispatch_tls_set_dispatch_key_excluded, torch._C.DispatchKey.BackendSelect
    dtype = torch.bfloat16 if cuda else torch.float32
    x, w, dy = (
        torch.randn(*shape, device=device, dtype=dtype) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    )

    def layers_ms(recorded: bool) -> float:
        exclude(key, not recorded)  # the hook's kernels are passed by, and so are its handles
        if cuda:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(LAYERS):
            dx = dy @ w
            work = dist.all_reduce(dx, async_op=True)
            dw = x.T @ dy
            work.wait()
        if cuda:
            torch.cuda.synchronize()
        took_ms = (time.perf_counter() - began_s) * 1000
        exclude(key, False)
        del dw
        return took_ms

    for _ in range(5):
        layers_ms(False), layers_ms(True)
    times = [(layers_ms(False), layers_ms(True)) for _ in range(PAIRS)]
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
