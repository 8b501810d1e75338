"""Layouts that are impossible, refused before any rank has joined; free of torch."""

import math

from reference_trainer.errors import UsageError
from reference_trainer.layout import IN_ROUNDS, Layout
from reference_trainer.presets import ModelShape


def refuse_impossible(layout: Layout, *, shape: ModelShape, batch_size: int, sequence_length: int) -> None:
    """Refuse an impossible layout, before any rank has joined."""
    _refuse_indivisible_model(layout, shape, sequence_length)
    _refuse_data_parallel_combination(layout)
    if layout.pp > 1:
        _refuse_impossible_pipeline(layout, shape)
    _refuse_indivisible_batch(layout, batch_size)


def _refuse_indivisible_model(layout: Layout, shape: ModelShape, sequence_length: int) -> None:
    divisor = math.gcd(shape.num_heads, shape.num_kv_heads, shape.hidden_dim)
    for count, what, advice in (
        (shape.num_heads, "attention heads", f"give a divisor of {divisor}"),
        (shape.num_kv_heads, "key-value heads", f"give a divisor of {divisor}"),
        (shape.hidden_dim, "columns of the feed-forward part", f"give a divisor of {divisor}"),
        (shape.vocabulary_size, "tokens of the vocabulary", f"give a --vocabulary-size that {layout.tp} divides"),
    ):
        if count % layout.tp:
            raise UsageError(f"--tp {layout.tp} does not divide the {count} {what} of this model; {advice}")
    # A rank holds two pieces of the sequence under --cp: an early and a late one.
    divided = [(f"--cp {layout.cp}", 2 * layout.cp)] if layout.cp > 1 else []
    divided += [("--sequence-parallel", layout.tp)] if layout.sequence_parallel else []
    pieces = math.prod(count for _, count in divided)
    if sequence_length % pieces:
        flags = " and ".join(flag for flag, _ in divided)
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
    if layout.local_sgd and layout.offloads_optimizer:
        raise UsageError(
            f"--offload {layout.offload} with --local-sgd {layout.local_sgd}: weights are averaged on the device, and "
            "the host's copy of them would not know; leave one out, or give --offload activations"
        )
    if layout.local_sgd < 0:
        raise UsageError(f"--local-sgd is {layout.local_sgd}; give the steps between two averages, from 1 on")
    if not 0 < layout.bucket_mb < math.inf:
        raise UsageError(f"--bucket-mb is {layout.bucket_mb}; give a number above 0, such as 25")
    if layout.compile and (layout.tp > 1 or layout.pp > 1):
        flag = f"--tp {layout.tp}" if layout.tp > 1 else f"--pp {layout.pp}"
        raise UsageError(
            f"--compile with {flag}: layers compiled one by one fit data and context parallelism only; leave one out"
        )
    if layout.offloads_activations and (layout.compile or layout.activation_checkpointing != "none"):
        flag = "--compile" if layout.compile else f"--activation-checkpointing {layout.activation_checkpointing}"
        raise UsageError(
            f"--offload {layout.offload} with {flag}: both decide what a layer keeps for its backward pass; leave one "
            "out, or give --offload optimizer"
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
        (f"--offload {layout.offload}", layout.offload != "none"),
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
