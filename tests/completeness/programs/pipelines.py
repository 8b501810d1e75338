"""Scenarios: the schedules of torch.distributed.pipelining."""

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from tests.completeness.programs.models import WIDTH, Scenarios, layers, mesh

SCENARIOS = Scenarios("Pipeline schedules")
CPU = torch.device("cpu")


def squared_error(output, target):
    return ((output - target) ** 2).mean()


def run_pipeline(schedule, group=None, shard=None, evaluate=False):
    """Run two steps of a schedule, with two stages a rank where it wants them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = schedule.__name__
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        indices, num_stages = [rank], size
    elif name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        indices, num_stages = [rank, 2 * size - 1 - rank], 2 * size
    else:
        indices, num_stages = [rank, rank + size], 2 * size
    modules = [layers(1) for _ in indices]
    if shard is not None:
        modules = [fully_shard(module, mesh=shard) for module in modules]
    stages = [
        PipelineStage(module, i, num_stages, CPU, group=group) for module, i in zip(modules, indices, strict=True)
    ]
    num_microbatches = 2 * size
    running = schedule(stages[0] if len(stages) == 1 else stages, num_microbatches, loss_fn=squared_error)
    inputs = (torch.randn(2 * num_microbatches, WIDTH),) if 0 in indices else ()
    target = torch.randn(2 * num_microbatches, WIDTH) if num_stages - 1 in indices else None
    for _ in range(2):
        step = running.eval if evaluate else running.step
        step(*inputs, target=target, losses=[] if target is not None else None)


for found in (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
):

    @SCENARIOS.add(f"pipeline, {found.removeprefix('Schedule')}", ranks=(2, 4))
    def pipeline(schedule=found):
        run_pipeline(getattr(pipelining.schedules, schedule))


@SCENARIOS.add("pipeline, evaluation")
def pipeline_evaluation():
    run_pipeline(pipelining.ScheduleGPipe, evaluate=True)


@SCENARIOS.add("pipeline with FSDP2", ranks=(4,))
def pipeline_with_fsdp2():
    both = mesh(2, 2, "pp", "dp")
    run_pipeline(pipelining.Schedule1F1B, both.get_group("pp"), both["dp"])


@SCENARIOS.add("pipeline split by torch.export")
def traced_pipeline():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    split = {"2": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(model, mb_args=(torch.randn(2, WIDTH),), split_spec=split)
    schedule = pipelining.ScheduleGPipe(pipe.build_stage(dist.get_rank(), CPU), 2)
    schedule.step(*((torch.randn(4, WIDTH),) if dist.get_rank() == 0 else ()))
