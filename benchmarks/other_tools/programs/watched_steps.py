"""What a program adds for the tools that need it, chosen by TOOL.

"profiler": traces of four steps in FOLDER. "traceml": its context around each step. "flight-recorder": a dump after
10 s in FOLDER, which NCCL's watchdog writes by itself and gloo does not. Else nothing: dtprof needs no line.
"""

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

Step = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def training(model: torch.nn.Module) -> Iterator[Step]:
    """Give the context of a step."""
    tool = os.environ.get("TOOL", "")
    if tool == "profiler":
        with _profiler() as profiler:

            @contextlib.contextmanager
            def profiled() -> Iterator[None]:
                yield
                profiler.step()

            yield profiled
    elif tool == "traceml":
        import traceml_ai as traceml  # type: ignore[import-not-found]

        traceml.init(mode="auto")
        yield lambda: traceml.trace_step(model)
    elif tool == "flight-recorder":
        timer = threading.Timer(10, _dump)
        timer.daemon = True
        timer.start()
        yield contextlib.nullcontext
        timer.cancel()
    else:
        yield contextlib.nullcontext


def _profiler() -> torch.profiler.profile:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=4, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(os.environ["FOLDER"], f"rank{dist.get_rank()}"),
        profile_memory=True,
    )


def _dump() -> None:
    dumped = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    # NCCL's dumps name the members of each group, those of gloo in torch 2.13 do not: the analysis fails without.
    world = dist.distributed_c10d._world
    dumped["pg_config"] = {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in world.pg_names.items()
    }
    Path(os.environ["FOLDER"], f"dump_{dist.get_rank()}").write_bytes(pickle.dumps(dumped))
