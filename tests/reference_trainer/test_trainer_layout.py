"""What is refused, how degrees are filled in, and how layers become stages."""

import re
import shlex

import pytest

from reference_trainer.errors import UsageError
from reference_trainer.layout import Layout
from reference_trainer.options import Options, parse_options
from reference_trainer.parity import BASE
from reference_trainer.parity_layouts import LAYOUTS, MODELS
from reference_trainer.placement import Placement


def parse(text: str, *, world_size: int) -> Options:
    return parse_options(shlex.split(text), Placement(world_size=world_size))


def layout(text: str, *, world_size: int) -> Layout:
    return parse(f"--preset deep {text}", world_size=world_size).layout


def test_data_parallel_ranks_are_those_that_the_others_leave_over() -> None:
    assert layout("--tp 2 --pp 2", world_size=8).dp == 2
    assert layout("--cp 2", world_size=8).dp == 4
    assert layout("", world_size=1).dp == 1


def test_pipelines_have_two_microbatches_a_stage_unless_reported() -> None:
    assert layout("--pp 2", world_size=2).microbatches == 4
    assert layout("--pp 2 --schedule zbv", world_size=2).microbatches == 8
    assert layout("--pp 2 --schedule zbv", world_size=2).num_stages == 4
    assert layout("--pp 2 --microbatches 2", world_size=2).microbatches == 2


def test_shards_stay_between_the_two_parts_of_a_backward() -> None:
    assert layout("--pp 2 --dp-mode fsdp --schedule zbv", world_size=4).zero_stage == 2
    assert layout("--pp 2 --dp-mode fsdp --schedule 1f1b", world_size=4).zero_stage == 3


@pytest.mark.parametrize(
    ("arguments", "world_size", "message"),
    [
        ("--tp 3", 4, "--tp 3 x --cp 1 x --pp 1 = 3 does not divide the 4 rank(s) that the launcher started"),
        ("--dp 2 --tp 4", 4, "--dp 2 x --tp 4 x --cp 1 x --pp 1 = 8, but the launcher started 4 rank(s)"),
        ("--dp 2", 4, "--dp 2, but the launcher started 4 rank(s); leave --dp out, or start with torchrun"),
        ("--pp 0", 1, "--pp is 0; give a whole number from 1 on"),
        ("--tp 3", 3, "--tp 3 does not divide the 8 attention heads of this model; give a divisor of 4"),
        ("--tp 8", 8, "--tp 8 does not divide the 4 key-value heads of this model; give a divisor of 4"),
        ("--tp 2 --vocabulary-size 257", 2, "--tp 2 does not divide the 257 tokens of the vocabulary of this model; "
         "give a --vocabulary-size that 2 divides"),
        ("--cp 2 --tp 2 --sequence-length 18", 4, "--sequence-length 18 with --cp 2 has to be a multiple of 4"),
        ("--cp 2 --sequence-length 18", 2, "--sequence-length 18 with --cp 2 has to be a multiple of 4"),
        ("--cp 2 --tp 2 --sequence-parallel --sequence-length 20", 4,
         "--sequence-length 20 with --cp 2 and --sequence-parallel has to be a multiple of 8"),
        ("--sequence-parallel", 1, "--sequence-parallel divides the sequence over tensor-parallel ranks; give --tp 2"),
        ("--batch-size 6 --accumulate 2", 4, "--dp 4 x --accumulate 2 = 8; give a multiple of 8, such as 8"),
        ("--pp 2 --microbatches 5", 2, "--batch-size 16 does not divide by --dp 1 x --microbatches 5 = 5"),
        ("--pp 4 --microbatches 2", 4, "--microbatches 2 is fewer than the 4 stages of --schedule 1f1b"),
        ("--pp 4 --schedule dualpipev --microbatches 4", 4, "--microbatches 4 is fewer than the 8 stages"),
        ("--pp 3 --schedule interleaved1f1b --microbatches 7 --stages-per-rank 2", 3,
         "--microbatches 7 does not divide into rounds of --pp 3"),
        ("--pp 2 --schedule zbv --stages-per-rank 3", 2, "--schedule zbv has 2 on each rank"),
        ("--preset tiny --pp 4 --schedule zbv", 4, "needs 8 layers or more, but the model has 4"),
        ("--pp 2 --pp-split 4,3", 2, "--pp-split 4,3: give 2 numbers of layers, each 1 or more, that add up to 8"),
        ("--pp 2 --pp-split a,b", 2, "--pp-split a,b: give whole numbers with commas, such as 2,3, or 'balanced'"),
        ("--pp 2 --accumulate 2", 2, "--accumulate 2 with --pp 2: a pipeline accumulates over its microbatches"),
        ("--microbatches 4", 2, "--microbatches is for a pipeline; give --pp 2 or more too"),
        ("--schedule zbv", 2, "--schedule is for a pipeline"),
        ("--pp 2 --schedule zbv --compile", 2, "--compile with --pp 2: layers compiled one by one"),
        ("--pp 2 --schedule zbv --activation-checkpointing full", 2, "--activation-checkpointing full with --schedule"),
        ("--pp 2 --dp-mode fsdp --zero-stage 3 --schedule zbv", 4, "--zero-stage 3 with --schedule zbv: it frees"),
        ("--zero-stage 2", 2, "--zero-stage 2 is for sharded models; give --dp-mode fsdp or hsdp too"),
        ("--dp-replicas 2", 4, "--dp-replicas 2 is for sharded replicas; give --dp-mode hsdp too"),
        ("--dp-mode hsdp", 2, "--dp-mode hsdp shards inside --dp-replicas 2, which has to divide --dp 2"),
        ("--tp 2 --dp-mode zero1", 4, "--dp-mode zero1 with --tp 2: it needs the whole model on every rank"),
        ("--pp 2 --compression fp16", 4, "--compression fp16 with --pp 2: it needs the whole model on every rank"),
        ("--dp-mode fsdp --local-sgd 4", 4, "--local-sgd 4 with --dp-mode fsdp: it needs the whole model"),
        ("--cp 2 --local-sgd 4", 4, "--local-sgd 4 sends no gradients, which --cp"),
        ("--static-graph --accumulate 2", 2, "--static-graph with --accumulate 2: it takes all that is to know"),
        ("--cp-attention ring", 2, "--cp-attention ring is for a divided sequence; give --cp 2 or more too"),
        ("--offload both --compile", 2, "--offload both with --compile: both decide what a layer keeps"),
        ("--offload activations --activation-checkpointing full", 2,
         "--offload activations with --activation-checkpointing full: both decide"),
        ("--offload optimizer --local-sgd 4", 2, "--offload optimizer with --local-sgd 4: weights are averaged on the"),
        ("--offload optimizer --dp-mode ps", 2, "--offload optimizer with --dp-mode ps: a parameter server knows"),
        ("--bucket-mb 0", 2, "--bucket-mb is 0.0; give a number above 0"),
        ("--bucket-mb inf", 2, "--bucket-mb is inf; give a number above 0"),
        ("--bucket-mb 5 --dp-mode fsdp", 2, "--bucket-mb 5 is for DistributedDataParallel"),
        ("--bucket-mb 5 --tp 2", 4, "--bucket-mb 5 is for DistributedDataParallel"),
        ("--model gpt --preset bart-base", 1, "--model gpt: --preset bart-base has no such model; give --preset tiny"),
        ("--model bart --sequence-length 2048", 1, "--sequence-length 2048: this model has 1024 positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_spread_is_refused_by_flag(arguments: str, world_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(f"--preset deep {arguments}", world_size=world_size)


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_of_the_parity_command_is_accepted(model: str) -> None:
    for one in LAYOUTS:
        parse(f"{BASE} --model {model} {one.both} {one.arguments}", world_size=one.num_ranks)


def test_the_covering_set_has_each_kind_on_four_ranks_at_most() -> None:
    covering = " ".join(one.arguments for one in LAYOUTS if one.covering)
    kinds = ("zero1", "fsdp", "hsdp", "--tp", "--sequence-parallel", "--cp", "gpipe", "1f1b", "zbv", "dualpipev")
    assert [kind for kind in kinds if kind not in covering] == []
    assert max(one.num_ranks for one in LAYOUTS if one.covering) <= 4
