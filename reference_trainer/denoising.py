"""How BART's input is damaged: sentences in another order, spans of tokens replaced by one mask each; free of torch.

As in the paper (Lewis et al. 2019): the lengths of spans are drawn from a Poisson distribution of mean 3 until they
cover 30 % of the tokens; a span of length 0 adds a mask where nothing is missing.
"""

import numpy as np
from numpy.typing import NDArray

from reference_trainer.tokenizer import ENDS_LINE, ENDS_WITH_STOP, STARTS_WITH_SPACE

MASKED_SHARE = 0.3
MEAN_SPAN = 3.0

Tokens = NDArray[np.int64]


def damage(tokens: Tokens, *, mask: int, marks: NDArray[np.uint8], random: np.random.Generator) -> Tokens:
    """Return the damaged copy that the encoder sees; its length differs."""
    return fill_in(permute_sentences(tokens, marks=marks, random=random), mask=mask, random=random)


def permute_sentences(tokens: Tokens, *, marks: NDArray[np.uint8], random: np.random.Generator) -> Tokens:
    """Put the sentences in random order; a sentence ends with a line, or with a full stop before white space."""
    found = marks[tokens]
    ends = (found & ENDS_LINE) > 0
    ends[:-1] |= ((found[:-1] & ENDS_WITH_STOP) > 0) & ((found[1:] & STARTS_WITH_SPACE) > 0)
    sentences = np.split(tokens, np.flatnonzero(ends[:-1]) + 1)
    return np.concatenate([sentences[place] for place in random.permutation(len(sentences))])


def fill_in(tokens: Tokens, *, mask: int, random: np.random.Generator) -> Tokens:
    """Replace spans of tokens, 30 % of all, by one mask each."""
    spans = draw_spans(round(MASKED_SHARE * len(tokens)), random=random)
    # A row of items, spans and single tokens, in which every place of a span is as likely as any other.
    num_items = len(tokens) - int(spans.sum()) + len(spans)
    is_span = np.zeros(num_items, dtype=bool)
    is_span[random.choice(num_items, size=len(spans), replace=False)] = True
    lengths = np.ones(num_items, dtype=np.int64)
    lengths[is_span] = spans
    starts = np.cumsum(lengths) - lengths
    result = np.full(num_items, mask, dtype=np.int64)
    result[~is_span] = tokens[starts[~is_span]]
    return result


def draw_spans(num_tokens: int, *, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw the lengths of spans until they cover this many tokens; the last one is cut to fit."""
    spans = np.zeros(0, dtype=np.int64)
    while spans.sum() < num_tokens:
        spans = np.concatenate((spans, random.poisson(MEAN_SPAN, size=num_tokens)))
    covered = np.cumsum(spans)
    count = int(np.searchsorted(covered, num_tokens)) + 1 if num_tokens else 0
    spans = spans[:count]
    if count:
        spans[-1] -= covered[count - 1] - num_tokens
    return spans
