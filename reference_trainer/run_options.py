"""The options of a run that are not about the layout: its text, its evaluations, its checkpoints; free of torch."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from reference_trainer.errors import UsageError
from reference_trainer.layout_options import refuse_below_one
from reference_trainer.presets import BartShape, ModelShape
from reference_trainer.tokenizer import NUM_BYTES, NUM_RESERVED, TOKENIZERS

CHECKPOINT_MODES = ("sync", "async")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Say how the corpus becomes tokens, who reads it, and how often held-out text is looked at."""

    tokenizer: str = "bytes"
    num_text_tokens: int = NUM_BYTES
    num_workers: int = 0
    evaluate_every: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Say where checkpoints go, how often, how many are kept, and whether training waits for them."""

    folder: Path
    every: int
    num_kept: int = 3
    asynchronous: bool = False
    resume: bool = False


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument_group("data").add_argument
    add("--tokenizer", choices=TOKENIZERS, help="bytes, or byte pairs learned from the corpus (default: by vocabulary)")
    add("--vocabulary-size", type=int, metavar="N", help="tokens of the model (default: of the preset)")
    add("--data-workers", type=int, default=0, metavar="N", help="processes that read ahead (default: 0)")
    add("--evaluate-every", type=int, metavar="N", help="steps between two looks at held-out text (default: never)")
    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint", type=read_path, metavar="DIR", help="folder for checkpoints")
    add("--checkpoint-every", type=int, metavar="N", help="steps between two (default: a tenth of the run)")
    add("--checkpoint-mode", choices=CHECKPOINT_MODES, help="async: write while training goes on (default: sync)")
    add("--keep", type=int, metavar="K", help="checkpoints that stay (default: 3)")
    add("--resume", action="store_true", help="continue from the last checkpoint, if there is one; on any layout")


def read_path(text: str) -> Path:
    """Refuse an empty path, as of a shell variable that is not set: it would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give one, or leave the option out")
    return Path(text)


def read_data_options(given: argparse.Namespace, shape: ModelShape) -> DataOptions:
    """Choose the tokenizer; refuse a vocabulary that it does not fit in."""
    refuse_below_one("evaluate_every", given.evaluate_every)
    if given.data_workers < 0:
        raise UsageError(f"--data-workers is {given.data_workers}; give a whole number from 0 on")
    room = shape.vocabulary_size - (NUM_RESERVED if isinstance(shape, BartShape) else 0)
    tokenizer = given.tokenizer or ("bpe" if room > NUM_BYTES else "bytes")
    if room < NUM_BYTES:
        raise UsageError(
            f"--vocabulary-size {shape.vocabulary_size} leaves {room} tokens for text, which has {NUM_BYTES} bytes; "
            f"give {shape.vocabulary_size - room + NUM_BYTES} or more"
        )
    return DataOptions(
        tokenizer=tokenizer,
        num_text_tokens=NUM_BYTES if tokenizer == "bytes" else room,
        num_workers=given.data_workers,
        evaluate_every=given.evaluate_every or 0,
    )


def read_checkpoint_options(given: argparse.Namespace, *, steps: int, restarted: bool) -> CheckpointOptions | None:
    """Fill in how often and how; refuse what needs a folder, and a folder that cannot be one.

    A job that torchrun has restarted resumes with or without --resume.
    """
    folder = given.checkpoint
    if folder is None:
        for flag, value in (
            ("--checkpoint-every", given.checkpoint_every),
            ("--checkpoint-mode", given.checkpoint_mode),
            ("--keep", given.keep),
            ("--resume", given.resume or None),
        ):
            if value is not None:
                raise UsageError(f"{flag} needs a folder; give --checkpoint DIR too")
        return None
    refuse_below_one("checkpoint_every", given.checkpoint_every)
    refuse_below_one("keep", given.keep)
    if given.local_sgd:
        raise UsageError(
            f"--checkpoint with --local-sgd {given.local_sgd}: each rank has its own weights between two averages, "
            "and a checkpoint holds one; leave one of the two out"
        )
    return CheckpointOptions(
        folder=folder,
        every=given.checkpoint_every or max(1, steps // 10),
        num_kept=given.keep or 3,
        asynchronous=given.checkpoint_mode == "async",
        resume=given.resume or restarted,
    )
