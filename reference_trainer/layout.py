"""How a model is spread over ranks, as the command line says it, and what cannot be; free of torch."""

import argparse
import math
from dataclasses import dataclass

from reference_trainer.errors import UsageError
from reference_trainer.placement import Placement
from reference_trainer.presets import ModelShape

DP_MODES = ("ddp", "zero1", "fsdp", "hsdp", "ps")
CHECKPOINTING = ("none", "selective", "full")
COMPRESSIONS = ("none", "fp16", "powersgd")
# Schedule, and the stages that a rank holds; None where it can be chosen.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": None, "zero-bubble": None, "zbv": 2, "dualpipev": 2}
SPLITTING_SCHEDULES = ("zero-bubble", "zbv", "dualpipev")  # backward in two parts: of inputs, and of weights
IN_ROUNDS = ("interleaved1f1b", "zero-bubble")
BALANCED = "balanced"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Name the degrees of every kind of parallelism, and how each is done."""

    dp: int = 1
    dp_mode: str = "ddp"
    zero_stage: int = 3
    num_replicas: int = 1  # of hsdp
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    stages_per_rank: int = 1
    split: tuple[int, ...] | str | None = None  # layers of each stage; "balanced": measured; None: even
    accumulate: int = 1
    bucket_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    compression: str = "none"
    local_sgd: int = 0
    staleness: int | None = None  # of ps; None: all workers in step
    activation_checkpointing: str = "none"
    compile: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages over all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Tell whether the schedule computes gradients of inputs and of weights at different times."""
        return self.pp > 1 and self.schedule in SPLITTING_SCHEDULES

    @property
    def num_data_ranks(self) -> int:
        """Return the data-parallel ranks that train: all but a parameter server."""
        return self.dp - 1 if self.dp_mode == "ps" else self.dp

    @property
    def has_plain_parameters(self) -> bool:
        """Tell whether each rank holds the whole model as ordinary tensors, as DistributedDataParallel needs it."""
        return self.tp == 1 and self.pp == 1 and self.dp_mode in ("ddp", "zero1", "ps")

    def describe(self) -> str:
        """Name what is more than data parallelism by DDP, for a person."""
        mode = f"{self.dp_mode}{self.zero_stage if self.dp_mode in ('fsdp', 'hsdp') else ''}"
        degrees = (("dp", self.dp), ("tp", self.tp), ("cp", self.cp), ("pp", self.pp))
        spread = [f"{name} {degree}" for name, degree in degrees if degree > 1]
        if self.dp > 1:
            spread[0] += f" ({mode})" if mode != "ddp" else ""
        if self.pp > 1:
            spread[-1] += f" ({self.schedule}, {self.microbatches} microbatches)"
        return f": {', '.join(spread)}" if spread and spread != [f"dp {self.dp}"] else ""


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that spread the model."""
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
    add("--pp", type=int, default=1, metavar="N", help="pipeline ranks: layers divided")
    add("--schedule", choices=SCHEDULES, help="order of a pipeline's microbatches (default: 1f1b)")
    add("--microbatches", type=int, metavar="M", help="of a pipeline, each step (default: two a stage, if they divide)")
    add("--stages-per-rank", type=int, metavar="N", help="of interleaved1f1b and zero-bubble (default: 2)")
    add("--pp-split", metavar="N,N,...", help="layers of each stage, or 'balanced': by measured time (default: even)")
    add("--accumulate", type=int, default=1, metavar="K", help="micro-batches a step on each rank (default: 1)")
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
        spread = f"--dp {dp}" + (f" x {degrees} = {dp * others}" if others > 1 else "")
        raise UsageError(
            f"{spread}, but the launcher started {world_size} rank(s); leave --dp out, or start with "
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
    )


def refuse_below_one(name: str, value: int | None) -> None:
    """Refuse a count that is no count."""
    if value is not None and value < 1:
        raise UsageError(f"--{name.replace('_', '-')} is {value}; give a whole number from 1 on")


def refuse_impossible(layout: Layout, *, shape: ModelShape, batch_size: int, sequence_length: int) -> None:
    """Refuse what cannot be spread like this, before any rank has joined."""
    _refuse_indivisible_model(layout, shape, sequence_length)
    _refuse_data_parallel_combination(layout)
    if layout.pp > 1:
        _refuse_impossible_pipeline(layout, shape)
    _refuse_indivisible_batch(layout, batch_size)


def _refuse_indivisible_model(layout: Layout, shape: ModelShape, sequence_length: int) -> None:
    for count, what in (
        (shape.num_heads, "attention heads"),
        (shape.num_kv_heads, "key-value heads"),
        (shape.hidden_dim, "columns of the feed-forward part"),
        (shape.vocabulary_size, "tokens of the vocabulary"),
    ):
        if count % layout.tp:
            raise UsageError(
                f"--tp {layout.tp} does not divide the {count} {what} of this model; "
                f"give a divisor of {math.gcd(shape.num_kv_heads, shape.num_heads)}"
            )
    # A rank holds two pieces of the sequence under --cp: an early and a late one.
    pieces = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sequence_parallel else 1)
    if sequence_length % pieces:
        flags = " and ".join(
            ([f"--cp {layout.cp}"] if layout.cp > 1 else []) + (["--sequence-parallel"] if layout.tp > 1 else [])
        )
        raise UsageError(f"--sequence-length {sequence_length} with {flags} has to be a multiple of {pieces}")


def _refuse_indivisible_batch(layout: Layout, batch_size: int) -> None:
    workers = f"{layout.num_data_ranks} workers" if layout.dp_mode == "ps" else f"--dp {layout.dp}"
    parts, flags = layout.num_data_ranks * layout.accumulate, f"{workers} x --accumulate {layout.accumulate}"
    if layout.pp > 1:
        parts, flags = layout.dp * layout.microbatches, f"--dp {layout.dp} x --microbatches {layout.microbatches}"
    if batch_size % parts:
        raise UsageError(
            f"--batch-size {batch_size} does not divide by {flags} = {parts}; "
            f"give a multiple of {parts}, such as {-(-batch_size // parts) * parts}"
        )


def _refuse_data_parallel_combination(layout: Layout) -> None:
    if layout.dp_mode == "ps":
        _refuse_impossible_server(layout)
    if layout.dp_mode == "hsdp" and (layout.dp % layout.num_replicas or layout.dp == layout.num_replicas):
        raise UsageError(
            f"--dp-mode hsdp shards inside --dp-replicas {layout.num_replicas}, which has to divide --dp {layout.dp} "
            "into shards of two ranks or more; start more ranks, or give --dp-mode fsdp"
        )
    if not layout.has_plain_parameters:
        axis = f"--tp {layout.tp}" if layout.tp > 1 else f"--pp {layout.pp}"
        where = f"with --dp-mode {layout.dp_mode}" if layout.dp_mode in ("fsdp", "hsdp") else f"with {axis}"
        for flag, wanted in (
            ("--dp-mode zero1", layout.dp_mode == "zero1"),
            (f"--compression {layout.compression}", layout.compression != "none"),
            (f"--local-sgd {layout.local_sgd}", bool(layout.local_sgd)),
            ("--find-unused-parameters", layout.find_unused_parameters),
            ("--static-graph", layout.static_graph),
        ):
            if wanted:
                raise UsageError(
                    f"{flag} {where}: it needs the whole model on every rank; leave it out, or give --dp and --cp only"
                )
    if layout.local_sgd and (layout.cp > 1 or layout.compression != "none" or layout.dp_mode == "zero1"):
        raise UsageError(
            f"--local-sgd {layout.local_sgd} sends no gradients, which --cp, --compression and --dp-mode zero1 need; "
            "leave them out"
        )
    if layout.local_sgd < 0:
        raise UsageError(f"--local-sgd is {layout.local_sgd}; give the steps between two averages, from 1 on")
    if not layout.bucket_mb > 0:
        raise UsageError(f"--bucket-mb is {layout.bucket_mb}; give a number above 0, such as 25")
    if layout.compile and (layout.tp > 1 or layout.pp > 1):
        flag = f"--tp {layout.tp}" if layout.tp > 1 else f"--pp {layout.pp}"
        raise UsageError(
            f"--compile with {flag}: layers compiled one by one fit data and context parallelism only; leave one out"
        )
    if layout.sequence_parallel and layout.tp == 1:
        raise UsageError("--sequence-parallel divides the sequence over tensor-parallel ranks; give --tp 2 or more too")
    if layout.static_graph and (layout.find_unused_parameters or layout.accumulate > 1):
        flag = f"--accumulate {layout.accumulate}" if layout.accumulate > 1 else "--find-unused-parameters"
        raise UsageError(
            f"--static-graph with {flag}: it takes all that is to know from one pass, which has to average gradients; "
            "leave one of the two out"
        )


def _refuse_impossible_server(layout: Layout) -> None:
    if layout.dp < 2:
        raise UsageError("--dp-mode ps has a server on rank 0 and workers on the others; start two ranks or more")
    for flag, wanted in (
        (f"--tp {layout.tp}", layout.tp > 1),
        (f"--cp {layout.cp}", layout.cp > 1),
        (f"--pp {layout.pp}", layout.pp > 1),
        (f"--compression {layout.compression}", layout.compression != "none"),
        (f"--local-sgd {layout.local_sgd}", bool(layout.local_sgd)),
        ("--find-unused-parameters", layout.find_unused_parameters),
        ("--static-graph", layout.static_graph),
    ):
        if wanted:
            raise UsageError(f"{flag} with --dp-mode ps: a parameter server knows whole models only; leave it out")


def _refuse_impossible_pipeline(layout: Layout, shape: ModelShape) -> None:
    name, count, stages = layout.schedule, layout.microbatches, layout.num_stages
    if layout.accumulate > 1:
        raise UsageError(
            f"--accumulate {layout.accumulate} with --pp {layout.pp}: a pipeline accumulates over its microbatches; "
            f"give --microbatches {layout.accumulate * count} instead"
        )
    at_least = stages if name in ("dualpipev", "1f1b") else layout.pp
    if count < at_least:
        raise UsageError(
            f"--microbatches {count} is fewer than the {at_least} {'stages' if at_least == stages else 'ranks'} of "
            f"--schedule {name}; give --microbatches {at_least} or more"
        )
    if name in IN_ROUNDS and count % (count // layout.pp):
        raise UsageError(
            f"--microbatches {count} does not divide into rounds of --pp {layout.pp}, which --schedule {name} goes in; "
            f"give --microbatches {-(-count // layout.pp) * layout.pp}"
        )
    if shape.num_layers < stages:
        raise UsageError(
            f"--pp {layout.pp} with {layout.stages_per_rank} stage(s) on each rank needs {stages} layers or more, but "
            f"the model has {shape.num_layers}; lower --pp, or give --preset deep"
        )
    split = layout.split if isinstance(layout.split, tuple) else None
    if split and (len(split) != stages or sum(split) != shape.num_layers or min(split) < 1):
        raise UsageError(
            f"--pp-split {','.join(map(str, split))}: give {stages} numbers of layers, each 1 or more, that add up to "
            f"{shape.num_layers}"
        )
    if layout.splits_backward and layout.activation_checkpointing != "none":
        raise UsageError(
            f"--activation-checkpointing {layout.activation_checkpointing} with --schedule {name}: a backward in two "
            "parts would recompute twice; leave it out, or give --schedule interleaved1f1b"
        )


def _refuse_unused(given: argparse.Namespace) -> None:
    """Refuse an option that would change nothing."""
    if given.pp == 1:
        for name in ("schedule", "microbatches", "stages_per_rank", "pp_split"):
            if getattr(given, name) is not None:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is for a pipeline; give --pp 2 or more too, or leave --{flag} out")
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
