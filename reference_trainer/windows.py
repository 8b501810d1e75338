"""The tokens cut into windows of one length, and the order in which the samples of a run take them; free of torch."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from reference_trainer.errors import UsageError
from reference_trainer.options import Options
from reference_trainer.token_file import TokenFile, prepare_tokens

# One window in so many is for evaluation only.
HELD_OUT_EVERY = 64


class Windows:
    """Cut the tokens into windows of one length, some for training and some for evaluation."""

    def __init__(self, file: TokenFile, *, sequence_length: int, seed: int) -> None:
        self.tokens = file.tokens
        self.sequence_length = sequence_length
        self.seed = seed
        num_windows = (file.facts.num_tokens - 1) // sequence_length  # one more token each: the last target
        self.num_held_out = num_windows // HELD_OUT_EVERY
        self.num_trained = num_windows - self.num_held_out

    def read(self, sample: int) -> NDArray[np.int64]:
        """Return the window of a sample of the training, with one token more; every epoch has an order of its own."""
        epoch, place = divmod(sample, self.num_trained)
        trained = int(_draw_order(self.num_trained, self.seed, epoch)[place])
        # The last of every HELD_OUT_EVERY windows is passed over.
        return self._cut(trained + trained // (HELD_OUT_EVERY - 1))

    def read_held_out(self, place: int) -> NDArray[np.int64]:
        """Return a window for evaluation."""
        return self._cut(place * HELD_OUT_EVERY + HELD_OUT_EVERY - 1)

    def _cut(self, window: int) -> NDArray[np.int64]:
        start = window * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int64)


@lru_cache(maxsize=4)
def _draw_order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)


def read_tokens(options: Options) -> TokenFile:
    """Return the tokens of the corpus; refuse one that is too short."""
    file = prepare_tokens(
        options.corpus,
        limit_bytes=options.preset.corpus_limit_bytes,
        tokenizer=options.data.tokenizer,
        num_text_tokens=options.data.num_text_tokens,
    )
    refuse_short_corpus(file, options)
    return file


def refuse_short_corpus(file: TokenFile, options: Options) -> None:
    """Refuse a corpus that does not fill one global batch, or has none to spare for evaluation."""
    windows = Windows(file, sequence_length=options.sequence_length, seed=options.seed)
    source = f"--corpus {options.corpus}" if options.corpus else "the default corpus"
    held_out = f", and {windows.num_held_out} for evaluation" if options.data.evaluate_every else ""
    found = (
        f"{source} has {file.facts.num_tokens:,} tokens: {windows.num_trained} windows of "
        f"--sequence-length {options.sequence_length} to train on{held_out}"
    )
    advice = "give a longer text or lower one of the two"
    if windows.num_trained < options.batch_size:
        raise UsageError(f"{found}; one step takes --batch-size {options.batch_size}; {advice}")
    if options.data.evaluate_every and windows.num_held_out < options.batch_size:
        raise UsageError(
            f"{found}; one evaluation takes --batch-size {options.batch_size}; {advice}, or leave --evaluate-every out"
        )
