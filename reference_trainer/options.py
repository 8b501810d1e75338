"""What the command line sets, checked once where it is built; free of torch, so that a refusal is quick."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from reference_trainer.errors import UsageError
from reference_trainer.faults import Fault, describe_faults, parse_fault
from reference_trainer.layout import Layout
from reference_trainer.layout_limits import refuse_impossible
from reference_trainer.layout_options import add_layout_arguments, read_layout, refuse_below_one
from reference_trainer.outputs import refuse_content, refuse_unwritable_file
from reference_trainer.placement import Placement
from reference_trainer.presets import PRESETS, BartShape, ModelShape, Preset
from reference_trainer.run_options import (
    CheckpointOptions,
    DataOptions,
    add_run_arguments,
    read_checkpoint_options,
    read_data_options,
    read_path,
)

T = TypeVar("T")

PRECISIONS = ("fp64", "fp32", "bf16")

EPILOG = f"""\
examples:
  torchrun --nproc-per-node 4 -m reference_trainer --preset tiny
  torchrun --nproc-per-node 4 -m reference_trainer --model bart --dp 2 --pp 2 --schedule 1f1b
  torchrun --nproc-per-node 8 -m reference_trainer --preset deep --dp-mode fsdp --tp 2 --pp 2 --schedule zbv
  torchrun --nproc-per-node 4 -m reference_trainer --steps 20 --fault slow-rank:rank=2,ms=200
  python -m reference_trainer --corpus README.md --batch-size 8 --steps 20

faults, with their keys (the rank is the last one unless it is given):
{describe_faults()}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the settings of one run, which are the same on every rank."""

    preset_name: str
    model: str
    shape: ModelShape
    layout: Layout
    batch_size: int
    sequence_length: int
    precision: str
    learning_rate: float
    steps: int
    seed: int
    corpus: Path | None
    metrics: Path | None
    fault: Fault | None
    data: DataOptions
    checkpoint: CheckpointOptions | None
    tensorboard: Path | None
    mfu: bool
    share_devices: bool = False

    @property
    def preset(self) -> Preset:
        """Return the defaults that the run started from."""
        return PRESETS[self.preset_name]

    @property
    def rank_batch_size(self) -> int:
        """Return the sequences of a step that one data-parallel rank sees."""
        return self.batch_size // self.layout.num_data_ranks

    @property
    def microbatch_size(self) -> int:
        """Return the sequences in one forward pass of one rank."""
        return self.rank_batch_size // (self.layout.accumulate * self.layout.microbatches)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step over all ranks."""
        return self.batch_size * self.sequence_length

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "steps"):
            refuse_below_one(name, getattr(self, name))
        if not 0 <= self.seed < 2**40:
            raise UsageError(f"--seed is {self.seed}; give a whole number from 0 to 2**40 - 1")
        if not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning-rate is {self.learning_rate}; give a number above 0, such as 3e-3")
        if isinstance(self.shape, BartShape) and self.sequence_length > self.shape.max_length:
            raise UsageError(
                f"--sequence-length {self.sequence_length}: this model has {self.shape.max_length} positions; "
                "give no more"
            )
        refuse_impossible(
            self.layout, shape=self.shape, batch_size=self.batch_size, sequence_length=self.sequence_length
        )
        for flag, wanted in (
            ("--checkpoint", self.checkpoint is not None),
            ("--evaluate-every", bool(self.data.evaluate_every)),
            ("--mfu", self.mfu),
        ):
            if wanted and self.layout.dp_mode == "ps":
                raise UsageError(f"{flag} with --dp-mode ps: that loop is kept small; leave one of the two out")
        if self.metrics is not None:
            refuse_unwritable_file(self.metrics)
            if not (self.checkpoint and self.checkpoint.resume):
                refuse_content(self.metrics)


class _Parser(argparse.ArgumentParser):
    """Report a wrong command line in the same way as every other refusal."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see python -m reference_trainer --help")


def parse_options(arguments: Sequence[str], placement: Placement) -> Options:
    """Read the command line; what it leaves out comes from the preset."""
    given = _build_parser().parse_args(arguments)
    preset = PRESETS[given.preset]
    model = given.model or next(iter(preset.shapes))
    if model not in preset.shapes:
        others = ", ".join(name for name, other in PRESETS.items() if model in other.shapes)
        raise UsageError(f"--model {model}: --preset {given.preset} has no such model; give --preset {others}")
    layout = read_layout(given, placement)
    shape = preset.shapes[model]
    if given.vocabulary_size is not None:
        refuse_below_one("vocabulary_size", given.vocabulary_size)
        shape = replace(shape, vocabulary_size=given.vocabulary_size)
    steps = _default(given.steps, preset.steps)
    batch_size = _default(given.batch_size, preset.batch_size)
    return Options(
        preset_name=given.preset,
        model=model,
        shape=shape,
        layout=layout,
        batch_size=batch_size,
        sequence_length=_default(given.sequence_length, preset.sequence_length),
        precision=given.precision or preset.precision,
        learning_rate=_default(given.learning_rate, preset.learning_rate * batch_size / preset.batch_size),
        steps=steps,
        seed=given.seed,
        corpus=given.corpus,
        metrics=given.metrics,
        fault=_read_fault(given.fault, placement, layout, steps=steps),
        data=read_data_options(given, shape),
        checkpoint=read_checkpoint_options(given, steps=steps, restarted=placement.attempt > 0),
        tensorboard=given.tensorboard,
        mfu=given.mfu,
        share_devices=given.share_devices,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m reference_trainer",
        description="Train a language model in parallel on real text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="tiny", help="sizes and defaults of the rest (default: tiny)")
    add("--model", choices=["gpt", "bart"], help="gpt: a decoder (default); bart: encoder and decoder")
    add("--batch-size", type=int, metavar="N", help="sequences a step, over all ranks")
    add("--sequence-length", type=int, metavar="N", help="tokens a sequence")
    add("--precision", choices=PRECISIONS, help="bf16: autocast over fp32 weights")
    add("--learning-rate", type=float, metavar="LR", help="peak, behind the warm-up (default: scaled by --batch-size)")
    add("--steps", type=int, metavar="N", help="optimizer steps")
    add("--seed", type=int, default=0, metavar="S", help="of the weights and of the order of the text (default: 0)")
    add(
        "--corpus",
        type=read_path,
        metavar="PATH",
        help="text file, .jsonl, or folder (default: Python's standard library)",
    )
    add("--metrics", type=read_path, metavar="FILE.jsonl", help="new file for one JSON line a step, written by rank 0")
    add("--tensorboard", type=read_path, metavar="DIR", help="folder for scalars in the format of TensorBoard")
    add(
        "--mfu", action="store_true", help="state the share of the matrix-product peak, measured at start, that is used"
    )
    add("--share-devices", action="store_true", help="several ranks on a CUDA device: to try layouts, not for speed")
    add_layout_arguments(parser)
    add_run_arguments(parser)
    add("--fault", metavar="NAME[:key=value,...]", help="inject a fault; listed below")
    return parser


def _read_fault(text: str | None, placement: Placement, layout: Layout, *, steps: int) -> Fault | None:
    """Read a fault; a job that was restarted has none, or it would never end."""
    if text is None:
        return None
    fault = parse_fault(text, world_size=placement.world_size, pipeline_ranks=layout.pp, steps=steps)
    if layout.dp_mode == "ps" and (fault.needs_collectives or fault.rank == 0):
        raise UsageError(f"--fault {text}: a parameter server has no such fault; give another one, of a rank from 1 on")
    return None if placement.attempt > 0 else fault


def _default(given: T | None, preset: T) -> T:
    return preset if given is None else given
