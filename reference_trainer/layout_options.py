"""How a model is parallelized over ranks, as the command line says it; free of torch."""

import argparse

from reference_trainer.errors import UsageError
from reference_trainer.layout import (
    ATTENTIONS,
    BALANCED,
    CHECKPOINTING,
    COMPRESSIONS,
    DP_MODES,
    OFFLOADS,
    SCHEDULES,
    SPLITTING_SCHEDULES,
    Layout,
)
from reference_trainer.placement import Placement


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that parallelize the model."""
    add = parser.add_argument_group("parallelism").add_argument
    add("--dp", type=int, metavar="N", help="data-parallel ranks (default: those that the other degrees leave over)")
    add("--dp-mode", choices=DP_MODES, default="ddp", help="ddp: whole model on each; zero1: optimizer sharded; fsdp: "
        "model sharded; hsdp: sharded inside replicas; ps: parameter server on rank 0")  # fmt: skip
    add(
        "--zero-stage",
        type=int,
        choices=[2, 3],
        help="of fsdp, hsdp: 2 keeps the weights for the backward, 3 (default) not",
    )
    add("--dp-replicas", type=int, metavar="N", help="of hsdp: replicas, each over dp / N ranks (default: 2)")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks: heads, widths and vocabulary divided")
    add("--sequence-parallel", action="store_true", help="with --tp: divide the sequence too where it is not attended")
    add("--cp", type=int, default=1, metavar="N", help="context-parallel ranks: the sequence of attention divided")
    add("--cp-attention", choices=ATTENTIONS, help="of cp: keys and values of all ranks gathered (default), or sent on "
        "from rank to rank")  # fmt: skip
    add("--pp", type=int, default=1, metavar="N", help="pipeline ranks: layers divided")
    add("--schedule", choices=SCHEDULES, help="order of a pipeline's microbatches (default: 1f1b)")
    add("--microbatches", type=int, metavar="M", help="of a pipeline, each step (default: two a stage)")
    add("--stages-per-rank", type=int, metavar="N", help="of interleaved1f1b and zero-bubble (default: 2)")
    add("--pp-split", metavar="N,N,...", help="layers of each stage, or 'balanced': by measured time (default: even)")
    add("--accumulate", type=int, default=1, metavar="K", help="microbatches a step on each rank (default: 1)")
    add("--bucket-mb", type=float, metavar="MB", help="of ddp: gradients sent at a time (default: 25)")
    add("--find-unused-parameters", action="store_true", help="of ddp: search each step for weights without gradient")
    add("--static-graph", action="store_true", help="of ddp: take every step to be like the first")
    add("--compression", choices=COMPRESSIONS, default="none", help="of ddp: of gradients on their way")
    add(
        "--staleness",
        type=int,
        metavar="S",
        help="of ps: steps a worker may be ahead of the slowest (default: in step)",
    )
    add("--local-sgd", type=int, default=0, metavar="H", help="of ddp: average weights every H steps, not gradients")
    add("--activation-checkpointing", choices=CHECKPOINTING, default="none", help="recompute layers in the backward")
    add("--compile", action="store_true", help="compile each layer with torch.compile")
    add("--offload", choices=OFFLOADS, default="none", help="to the host: the optimizer's state and work, activations "
        "until the backward, or both")  # fmt: skip


def read_layout(given: argparse.Namespace, placement: Placement) -> Layout:
    """Fill in what follows from the rest; refuse degrees that do not multiply to the ranks started."""
    others = given.tp * given.cp * given.pp
    world_size = placement.world_size
    for flag in ("dp", "tp", "cp", "pp", "microbatches", "stages_per_rank", "accumulate", "dp_replicas"):
        refuse_below_one(flag, getattr(given, flag))
    degrees = f"--tp {given.tp} x --cp {given.cp} x --pp {given.pp}"
    if given.dp is None and world_size % others:
        raise UsageError(
            f"{degrees} = {others} does not divide the {world_size} rank(s) that the launcher started; give degrees "
            f"that do, or start a multiple with torchrun --nproc-per-node {-(-world_size // others) * others}"
        )
    dp = world_size // others if given.dp is None else given.dp
    if dp * others != world_size:
        product = f"--dp {dp}" + (f" x {degrees} = {dp * others}" if others > 1 else "")
        raise UsageError(
            f"{product}, but the launcher started {world_size} rank(s); leave --dp out, or start with "
            f"torchrun --nproc-per-node {dp * others}"
        )
    schedule = given.schedule or "1f1b"
    splits_backward = schedule in SPLITTING_SCHEDULES
    if splits_backward and given.zero_stage == 3:
        raise UsageError(
            f"--zero-stage 3 with --schedule {schedule}: it frees the weights between the two parts of a backward; "
            "give --zero-stage 2, or --schedule interleaved1f1b"
        )
    fixed = SCHEDULES[schedule]
    if given.stages_per_rank and fixed and given.stages_per_rank != fixed:
        raise UsageError(f"--stages-per-rank {given.stages_per_rank}: --schedule {schedule} has {fixed} on each rank")
    stages_per_rank = (fixed or given.stages_per_rank or 2) if given.pp > 1 else 1
    _refuse_unused(given)
    return Layout(
        dp=dp,
        dp_mode=given.dp_mode,
        zero_stage=given.zero_stage or (2 if splits_backward else 3),
        num_replicas=(given.dp_replicas or 2) if given.dp_mode == "hsdp" else 1,
        tp=given.tp,
        sequence_parallel=given.sequence_parallel,
        cp=given.cp,
        cp_attention=given.cp_attention or "gather",
        pp=given.pp,
        schedule=schedule,
        microbatches=given.microbatches or (2 * given.pp * stages_per_rank if given.pp > 1 else 1),
        stages_per_rank=stages_per_rank,
        split=_read_split(given.pp_split),
        accumulate=given.accumulate,
        bucket_mb=25.0 if given.bucket_mb is None else given.bucket_mb,
        find_unused_parameters=given.find_unused_parameters,
        static_graph=given.static_graph,
        compression=given.compression,
        local_sgd=given.local_sgd,
        staleness=given.staleness,
        activation_checkpointing=given.activation_checkpointing,
        compile=given.compile,
        offload=given.offload,
    )


def refuse_below_one(name: str, value: int | None) -> None:
    """Refuse a count that is no count."""
    if value is not None and value < 1:
        raise UsageError(f"--{name.replace('_', '-')} is {value}; give a whole number from 1 on")


def _refuse_unused(given: argparse.Namespace) -> None:
    """Refuse an option that would change nothing."""
    if given.pp == 1:
        for name in ("schedule", "microbatches", "stages_per_rank", "pp_split"):
            if getattr(given, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is for a pipeline; give --pp 2 or more too, or leave --{flag} out")
    if given.bucket_mb is not None and (given.tp * given.pp > 1 or given.dp_mode not in ("ddp", "zero1")):
        raise UsageError(
            f"--bucket-mb {given.bucket_mb:g} is for DistributedDataParallel: --dp-mode ddp or zero1 without --tp and "
            "--pp; leave it out"
        )
    if given.cp_attention and given.cp == 1:
        raise UsageError(f"--cp-attention {given.cp_attention} is for a divided sequence; give --cp 2 or more too")
    if given.staleness is not None and given.dp_mode != "ps":
        raise UsageError(f"--staleness {given.staleness} is for a parameter server; give --dp-mode ps too")
    if given.staleness is not None and given.staleness < 0:
        raise UsageError(f"--staleness is {given.staleness}; give a whole number from 0 on")
    if given.zero_stage and given.dp_mode not in ("fsdp", "hsdp"):
        raise UsageError(f"--zero-stage {given.zero_stage} is for sharded models; give --dp-mode fsdp or hsdp too")
    if given.dp_replicas and given.dp_mode != "hsdp":
        raise UsageError(f"--dp-replicas {given.dp_replicas} is for sharded replicas; give --dp-mode hsdp too")


def _read_split(text: str | None) -> tuple[int, ...] | str | None:
    if text is None or text == BALANCED:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--pp-split {text}: give whole numbers with commas, such as 2,3, or '{BALANCED}'") from None
